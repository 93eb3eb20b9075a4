/** The Gaussian posterior N(θ*, P⁻¹), P = H + δ I, and what it says of the network's outputs. */

import { rotated, type Spectrum } from './curvature'
import { Matrix } from './matrix'

export interface Posterior {
  readonly theta: Float64Array
  readonly spectrum: Spectrum
  /** The prior precision δ: the prior is N(0, 1/δ) for every weight. */
  readonly precision: number
}

/** A Gaussian over the outputs of each input, without observation noise: mean (N, C) and N covariances (C, C). */
export interface OutputGaussian {
  readonly mean: Matrix
  readonly cov: readonly Matrix[]
}

/** Test inputs seen from the posterior: outputs, and Jacobian rows in the coordinates in which P is diagonal. */
export interface Probe {
  readonly f: Matrix
  readonly rows: Matrix
}

export function probe(at: Spectrum, f: Matrix, J: Matrix): Probe {
  return { f, rows: rotated(at, J) }
}

/** f(x) ~ N(f(x; θ*), J P⁻¹ Jᵀ), the linearised network's. */
export function outputGaussian(posterior: Posterior, { f, rows }: Probe): OutputGaussian {
  const variances = inverse(posterior)
  const c = f.cols
  const cov = Array.from({ length: f.rows }, (_, n) => {
    const made = new Matrix(c, c)
    for (let i = 0; i < c; i++) {
      for (let j = 0; j <= i; j++) {
        made.data[i * c + j] = made.data[j * c + i] = weighted(rows.row(n * c + i), rows.row(n * c + j), variances)
      }
    }
    return made
  })
  return { mean: f, cov }
}

/** Deviations of weights from θ* in the coordinates of the spectrum: ε / √(s + δ), ε ~ N(0, I). */
export function coordinateDeviations(posterior: Posterior, eps: Matrix): Matrix {
  const scale = inverse(posterior).map(Math.sqrt)
  const made = new Matrix(eps.rows, scale.length)
  for (let s = 0; s < eps.rows; s++) {
    const [from, to] = [eps.row(s), made.row(s)]
    for (let k = 0; k < to.length; k++) to[k] = from[k] * scale[k]
  }
  return made
}

/** Weights θ* + R ε with R Rᵀ = P⁻¹, one draw a row of eps: (S, P). */
export function weightDraws(posterior: Posterior, eps: Matrix): Matrix {
  const { theta, spectrum } = posterior
  const deviations = coordinateDeviations(posterior, eps)
  const made = new Matrix(eps.rows, theta.length)
  for (let s = 0; s < eps.rows; s++) {
    const row = made.row(s)
    row.set(theta)
    addInWeights(row.subarray(spectrum.start), deviations.row(s), spectrum)
  }
  return made
}

/** Draws of the linearised function at the probed inputs, f + J R ε: one (N, C) matrix a draw. */
export function functionDraws(posterior: Posterior, { f, rows }: Probe, eps: Matrix): Matrix[] {
  const deviations = coordinateDeviations(posterior, eps)
  return Array.from({ length: eps.rows }, (_, s) => {
    const made = new Matrix(f.rows, f.cols)
    const z = deviations.row(s)
    for (let i = 0; i < rows.rows; i++) {
      const row = rows.row(i)
      let total = f.data[i]
      for (let k = 0; k < z.length; k++) total += row[k] * z[k]
      made.data[i] = total
    }
    return made
  })
}

/** The diagonal of P⁻¹ in the coordinates of the spectrum. */
function inverse({ spectrum, precision }: Posterior): Float64Array {
  return spectrum.values.map((s) => 1 / (s + precision))
}

function weighted(a: Float64Array, b: Float64Array, weights: Float64Array): number {
  let total = 0
  for (let k = 0; k < weights.length; k++) total += a[k] * b[k] * weights[k]
  return total
}

function addInWeights(into: Float64Array, z: Float64Array, { basis }: Spectrum): void {
  for (let k = 0; k < z.length; k++) {
    if (basis === null) {
      into[k] += z[k]
      continue
    }
    const vector = basis.row(k)
    for (let i = 0; i < into.length; i++) into[i] += z[k] * vector[i]
  }
}
