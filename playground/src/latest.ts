// A worker that is asked for the newest request only: those that it had no time for are dropped.
// A worker that fails is reported once and not asked again. A pause after every answer leaves the
// processor to the page.

export class Latest<Request, Result> {
  private waiting: Request | undefined;
  private busy = false;
  private hasFailed = false;

  constructor(
    private readonly worker: Worker,
    private readonly receive: (result: Result) => void,
    fail: (reason: string) => void,
    pause = 0, // milliseconds
  ) {
    worker.onerror = (event: ErrorEvent) => {
      if (this.hasFailed) return;
      this.hasFailed = true;
      fail(event.message || "its script could not be loaded");
    };
    worker.onmessage = (event: MessageEvent<Result>) => {
      this.receive(event.data);
      window.setTimeout(() => {
        this.busy = false;
        this.next();
      }, pause);
    };
  }

  /** Whether every request has been answered or dropped. */
  get isIdle(): boolean {
    return this.hasFailed || (!this.busy && this.waiting === undefined);
  }

  ask(request: Request): void {
    this.waiting = request;
    this.next();
  }

  private next(): void {
    if (this.hasFailed || this.busy || this.waiting === undefined) return;
    this.busy = true;
    this.worker.postMessage(this.waiting);
    this.waiting = undefined;
  }
}
