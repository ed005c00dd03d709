// Logistic regression in the plane, and the answers of three methods about a query.
//
// The model is p(1|x) = σ(wᵀf) with the features f = (x, y, 1). Training minimises
//
//     F(w) = Σ_i log(1 + exp(-s_i wᵀf_i)) + λ‖w‖²,    s_i = 1 for class 1, -1 for class 0.
//
// For each label of a query, CNML (with λ > 0 also called CNMAP) minimises F plus the loss of the
// query. ACNML replaces F by its quadratic approximation at the minimum, ½(w - ŵ)ᵀH(w - ŵ). The
// logit of label y at the query then solves z_y = z + κ(t_y - σ(z_y)), with κ = fᵀH⁻¹f and t_y = 1
// or 0. `acnml.exact` is the reference; the tests compare both.

export interface Sample {
  readonly x: number;
  readonly y: number;
  readonly label: 0 | 1;
}

/** Probabilities of class 1, and the regret log C: 0 where no label could be explained better. */
export interface Judgement {
  readonly plain: number;
  readonly acnml: number;
  readonly acnmlRegret: number;
  readonly cnml: number;
  readonly cnmlRegret: number;
}

type Weights = readonly [number, number, number];
// The entries (0,0), (0,1), (0,2), (1,1), (1,2), (2,2) of a symmetric matrix.
type Symmetric = readonly [number, number, number, number, number, number];

const TOLERANCE = 1e-9; // of the expected gain of a Newton step
const MOST_STEPS = 60;

interface Trained {
  readonly weights: Weights;
  readonly inverse: Symmetric; // H⁻¹
}

/** A logistic regression, trained once; asked about any number of queries. */
export class Logistic {
  private readonly trained: Trained;

  constructor(
    private readonly samples: readonly Sample[],
    private readonly penalty: number,
  ) {
    this.trained = minimise(samples, penalty, [0, 0, 0]);
  }

  /** The probability of class 1 under the trained model. */
  plain(x: number, y: number): number {
    return sigmoid(logit(this.trained.weights, x, y));
  }

  /** ACNML's likelihoods of both labels, not normalised. */
  acnml(x: number, y: number): readonly [number, number] {
    const { weights, inverse: h } = this.trained;
    const z = logit(weights, x, y);
    const kappa =
      h[0] * x * x + h[3] * y * y + h[5] + 2 * (h[1] * x * y + h[2] * x + h[4] * y);
    return [adapted(-z, kappa), adapted(z, kappa)];
  }

  /** CNML's likelihoods of both labels: two refits. */
  cnml(x: number, y: number): readonly [number, number] {
    const refit = (label: 0 | 1): number => {
      const all = [...this.samples, { x, y, label }];
      const { weights } = minimise(all, this.penalty, this.trained.weights);
      return sigmoid((label ? 1 : -1) * logit(weights, x, y));
    };
    return [refit(0), refit(1)];
  }

  judge(x: number, y: number): Judgement {
    const [acnml, cnml] = [this.acnml(x, y), this.cnml(x, y)];
    return {
      plain: this.plain(x, y),
      acnml: share(acnml),
      acnmlRegret: Math.log(acnml[0] + acnml[1]),
      cnml: share(cnml),
      cnmlRegret: Math.log(cnml[0] + cnml[1]),
    };
  }
}

/** The probability of class 1 after normalising. */
export function share(likelihoods: readonly [number, number]): number {
  return likelihoods[1] / (likelihoods[0] + likelihoods[1]);
}

/** σ(m) with m = margin + κσ(-m), the margin of a label after the query was added with it. */
function adapted(margin: number, kappa: number): number {
  // m - margin - κσ(-m) increases in m and is zero between margin and margin + κ.
  let [low, high] = [margin, margin + kappa];
  let m = Math.min(Math.max(0, low), high);
  for (let step = 0; step < MOST_STEPS; step++) {
    const q = sigmoid(-m);
    const gap = m - margin - kappa * q;
    if (gap > 0) high = m;
    else low = m;
    let next = m - gap / (1 + kappa * q * (1 - q));
    if (!(next > low && next < high)) next = (low + high) / 2;
    if (Math.abs(next - m) < 1e-12 * (1 + Math.abs(m))) break;
    m = next;
  }
  return sigmoid(m);
}

/** Newton's method with steps that are halved until F falls; F is strictly convex. */
function minimise(samples: readonly Sample[], penalty: number, start: Weights): Trained {
  let weights = start;
  let value = objective(samples, penalty, weights);
  for (let step = 0; ; step++) {
    const [gradient, hessian] = derivatives(samples, penalty, weights);
    const inverse = inverted(hessian);
    const change = times(inverse, gradient);
    const gain = dot(gradient, change);
    if (gain < TOLERANCE || step === MOST_STEPS) return { weights, inverse };
    for (let length = 1; ; length /= 2) {
      const moved: Weights = [
        weights[0] - length * change[0],
        weights[1] - length * change[1],
        weights[2] - length * change[2],
      ];
      const reached = objective(samples, penalty, moved);
      if (reached <= value - 0.25 * length * gain || length < 1e-10) {
        [weights, value] = [moved, reached];
        break;
      }
    }
  }
}

function objective(samples: readonly Sample[], penalty: number, weights: Weights): number {
  let value = penalty * dot(weights, weights);
  for (const { x, y, label } of samples) {
    const margin = (label ? 1 : -1) * logit(weights, x, y);
    value += margin > 0 ? Math.log1p(Math.exp(-margin)) : Math.log1p(Math.exp(margin)) - margin;
  }
  return value;
}

function derivatives(
  samples: readonly Sample[],
  penalty: number,
  weights: Weights,
): [Weights, Symmetric] {
  const p2 = 2 * penalty;
  let [g0, g1, g2] = [p2 * weights[0], p2 * weights[1], p2 * weights[2]];
  let [h00, h01, h02, h11, h12, h22] = [p2, 0, 0, p2, 0, p2];
  for (const { x, y, label } of samples) {
    const p = sigmoid(logit(weights, x, y));
    const gap = p - label;
    const curvature = p * (1 - p);
    g0 += gap * x;
    g1 += gap * y;
    g2 += gap;
    h00 += curvature * x * x;
    h01 += curvature * x * y;
    h02 += curvature * x;
    h11 += curvature * y * y;
    h12 += curvature * y;
    h22 += curvature;
  }
  return [
    [g0, g1, g2],
    [h00, h01, h02, h11, h12, h22],
  ];
}

/** The inverse of a symmetric, positive definite 3 x 3 matrix, by its cofactors. */
function inverted([a, b, c, d, e, f]: Symmetric): Symmetric {
  const [A, B, C] = [d * f - e * e, c * e - b * f, b * e - c * d];
  const determinant = a * A + b * B + c * C;
  return [
    A / determinant,
    B / determinant,
    C / determinant,
    (a * f - c * c) / determinant,
    (b * c - a * e) / determinant,
    (a * d - b * b) / determinant,
  ];
}

function times(m: Symmetric, v: Weights): Weights {
  return [
    m[0] * v[0] + m[1] * v[1] + m[2] * v[2],
    m[1] * v[0] + m[3] * v[1] + m[4] * v[2],
    m[2] * v[0] + m[4] * v[1] + m[5] * v[2],
  ];
}

function dot(a: Weights, b: Weights): number {
  return a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
}

function logit(weights: Weights, x: number, y: number): number {
  return weights[0] * x + weights[1] * y + weights[2];
}

function sigmoid(z: number): number {
  return z >= 0 ? 1 / (1 + Math.exp(-z)) : Math.exp(z) / (1 + Math.exp(z));
}
