/** The Laplace evidence at the trained weights, and the prior precision and noise that maximise it. */

import { squaredNorm, type Spectrum } from './curvature'

/** log Z = logLik − ½ (logDetRatio + scatter), as in MacKay (1992). */
export interface Evidence {
  readonly total: number
  readonly logLik: number
  /** log det P − log det P₀ = Σ log(1 + s/δ): how much the data narrowed the weights down. */
  readonly logDetRatio: number
  /** δ ‖θ*‖²: how far the weights are from the prior's mean. */
  readonly scatter: number
}

export function logEvidence(logLik: number, at: Spectrum, theta: Float64Array, precision: number): Evidence {
  let logDetRatio = 0
  for (const s of at.values) logDetRatio += Math.log1p(s / precision)
  const scatter = precision * squaredNorm(at, theta)
  return { total: logLik - 0.5 * (logDetRatio + scatter), logLik, logDetRatio, scatter }
}

/** γ = Σ s / (s + δ): how many directions of the weights the data determine. */
export function effectiveDimension(at: Spectrum, precision: number): number {
  return at.values.reduce((total, s) => total + s / (s + precision), 0)
}

/** What the evidence needs to know of a fit: H at noise 1, ‖θ*‖², and for a regression its squared errors. */
export interface Fit {
  readonly unit: Spectrum
  readonly squaredNorm: number
  readonly squaredErrors: number
  readonly n: number
}

export interface Range {
  readonly least: number
  readonly most: number
}

export interface Hyperparameters {
  readonly precision: number
  readonly noiseStd: number
}

export interface Ranges {
  readonly precision: Range
  readonly noiseStd: Range
}

/** The δ of the highest evidence for a fixed H, within its range. */
export function bestPrecision(at: Spectrum, theta: Float64Array, range: Range): number {
  const fit: Fit = { unit: at, squaredNorm: squaredNorm(at, theta), squaredErrors: 0, n: 0 }
  return within(ascend(fit, { precision: 1, noiseStd: 1 }, [true, false]).precision, range)
}

/** The δ and σ of the highest evidence of a regression, each within its range. */
export function bestPrecisionAndNoise(fit: Fit, ranges: Ranges): Hyperparameters {
  const found = ascend(fit, { precision: 1, noiseStd: 0.3 }, [true, true])
  const precision = within(found.precision, ranges.precision)
  const noiseStd = within(found.noiseStd, ranges.noiseStd)
  // Where one is held at the end of its range, the best of the other is another.
  if (precision !== found.precision) {
    const other = ascend(fit, { precision, noiseStd }, [false, true])
    return { precision, noiseStd: within(other.noiseStd, ranges.noiseStd) }
  }
  if (noiseStd !== found.noiseStd) {
    const other = ascend(fit, { precision, noiseStd }, [true, false])
    return { precision: within(other.precision, ranges.precision), noiseStd }
  }
  return found
}

const MOST_STEPS = 200
const ENOUGH = 1e-13
const LONGEST = 2 // in log δ and log β: where there is no maximum, the ascent leaves the range instead of overflowing

/**
 * Newton's method on E(log δ, log β), β = 1/σ²:
 *
 *     E = n/2 log β − β/2 SSE − ½ Σ log(1 + β s/δ) − δ/2 ‖θ*‖² + constant
 *
 * With r = β s / (β s + δ), γ = Σ r and q = Σ r (1 − r), its gradient is ½ (γ − δ‖θ*‖², n − β SSE − γ) and its negative
 * Hessian ½ [[q + δ‖θ*‖², −q], [−q, q + β SSE]], which is positive definite: E is concave, with one maximum.
 */
function ascend(fit: Fit, start: Hyperparameters, free: readonly [boolean, boolean]): Hyperparameters {
  let a = Math.log(start.precision)
  let b = -2 * Math.log(start.noiseStd)
  for (let step = 0; step < MOST_STEPS; step++) {
    const [da, db] = newtonStep(fit, Math.exp(a), Math.exp(b), free)
    const length = Math.max(Math.abs(da), Math.abs(db))
    const scale = length > LONGEST ? LONGEST / length : 1
    a += scale * da
    b += scale * db
    if (length < ENOUGH || Math.max(Math.abs(a), Math.abs(b)) > 100) break
  }
  return { precision: Math.exp(a), noiseStd: Math.exp(-0.5 * b) }
}

function newtonStep(fit: Fit, precision: number, beta: number, free: readonly [boolean, boolean]): [number, number] {
  let [gamma, q] = [0, 0]
  for (const s of fit.unit.values) {
    const r = (beta * s) / (beta * s + precision)
    gamma += r
    q += r * (1 - r)
  }
  const norm = precision * fit.squaredNorm
  const errors = beta * fit.squaredErrors
  const [ga, gb] = [gamma - norm, fit.n - errors - gamma]
  const [haa, hbb] = [q + norm, q + errors]
  if (!free[1]) return [ratio(ga, haa), 0]
  if (!free[0]) return [0, ratio(gb, hbb)]
  const determinant = haa * hbb - q * q
  return [ratio(hbb * ga + q * gb, determinant), ratio(q * ga + haa * gb, determinant)]
}

/** 0/0, which is a flat evidence, moves nothing. */
function ratio(a: number, b: number): number {
  return a === 0 && b === 0 ? 0 : a / b
}

function within(value: number, { least, most }: Range): number {
  return Math.min(Math.max(value, least), most)
}
