/**
 * The generalised Gauss–Newton matrix H = Σₙ Jₙᵀ Λₙ Jₙ, in the three structures of the playground, kept as its spectrum.
 *
 * With H = Qᵀ diag(s) Q, everything that is asked of the precision P = H + δ I is a sum over s + δ. So a new prior
 * precision or noise costs no new decomposition: that is why the sliders answer at once.
 */

import type { Data } from './data'
import { eigenSymmetric } from './eigen'
import type { Likelihood } from './likelihoods'
import { gram, Matrix, squared, timesTransposed } from './matrix'
import type { Network } from './network'

export type Structure = 'full' | 'diag' | 'last_layer'

/** H in coordinates in which it is diagonal. */
export interface Spectrum {
  /** H acts on the weights from here on; the weights before it have no uncertainty. */
  readonly start: number
  /** Eigenvalues s, or the diagonal of H. */
  readonly values: Float64Array
  /** Row i is the eigenvector of value i; null: the coordinates are the weights themselves. */
  readonly basis: Matrix | null
}

export function spectrum(
  structure: Structure,
  network: Network,
  theta: Float64Array,
  likelihood: Likelihood,
  data: Data,
): Spectrum {
  const start = structure === 'last_layer' ? network.lastLayer : 0
  const rows = whitenedRows(network, theta, likelihood, data).columnsFrom(start)
  if (structure === 'diag') return { start, values: columnNorms(rows), basis: null }
  const { values, vectors } = eigenSymmetric(gram(rows))
  // Rounding may push the zero eigenvalues of a singular H slightly below zero.
  return { start, values: values.map((s) => Math.max(s, 0)), basis: vectors }
}

/** Φ with H = ΦᵀΦ: the rows of SₙᵀJₙ for every datum. */
export function whitenedRows(network: Network, theta: Float64Array, likelihood: Likelihood, data: Data): Matrix {
  const c = network.nOutputs
  const { f, J } = network.jacobian(theta, data.x)
  const made = new Matrix(data.x.rows * c, network.nParameters)
  for (let n = 0; n < data.x.rows; n++) {
    const S = likelihood.hessianRoot(f.row(n))
    for (let k = 0; k < c; k++) {
      const row = made.row(n * c + k)
      for (let i = 0; i < c; i++) addScaled(row, S[i][k], J.row(n * c + i))
    }
  }
  return made
}

/** Rows of a Jacobian in the coordinates of the spectrum: J Qᵀ, (N·C, P). */
export function rotated(at: Spectrum, J: Matrix): Matrix {
  const used = J.columnsFrom(at.start)
  return at.basis === null ? used : timesTransposed(used, at.basis)
}

/** The same H for another noise: H = c × what it was. */
export function scaledSpectrum(at: Spectrum, c: number): Spectrum {
  return { ...at, values: at.values.map((s) => c * s) }
}

function columnNorms(rows: Matrix): Float64Array {
  const made = new Float64Array(rows.cols)
  for (let n = 0; n < rows.rows; n++) {
    const row = rows.row(n)
    for (let i = 0; i < row.length; i++) made[i] += row[i] * row[i]
  }
  return made
}

function addScaled(into: Float64Array, scale: number, v: Float64Array): void {
  if (scale === 0) return
  for (let i = 0; i < v.length; i++) into[i] += scale * v[i]
}

/** Σ θ² over the weights that have uncertainty. */
export function squaredNorm(at: Spectrum, theta: Float64Array): number {
  return squared(theta.subarray(at.start))
}
