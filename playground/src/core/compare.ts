/**
 * Compare this core with the answers that Lapwing gave (`record_cases.py`). Run by the node tests on the sources, and
 * by the browser test inside the built page, so what is shipped is what was compared.
 */

import { spectrum, squaredNorm, type Structure } from './curvature'
import type { Data } from './data'
import {
  bestPrecision,
  bestPrecisionAndNoise,
  effectiveDimension,
  logEvidence,
  type Ranges,
} from './evidence'
import { Categorical, Gaussian, type Likelihood } from './likelihoods'
import { probabilities, type Link } from './links'
import { Matrix, squared } from './matrix'
import { Network } from './network'
import { functionDraws, outputGaussian, type Posterior, probe, weightDraws } from './posterior'
import { meanProbabilities, moments, sampledOutputs } from './predictive'
import { gradient, logLikelihood, loss, Training } from './training'

type Nested = number | readonly Nested[]

export interface Case {
  readonly inputs: {
    readonly name: string
    readonly widths: number[]
    readonly theta: number[]
    readonly x: number[][]
    readonly y: number[]
    readonly at: number[][]
    readonly eps: number[][]
    readonly structure: Structure
    readonly precision: number
    readonly noise_std: number
    readonly decay: number
  }
  readonly answers: Readonly<Record<string, Nested>>
}

export interface Cases {
  readonly curve: number[]
  readonly cases: Case[]
}

/** One quantity of one case: the largest difference, relative to the largest entry of Lapwing's answer. */
export interface Difference {
  readonly name: string
  readonly quantity: string
  readonly error: number
}

/** Beyond what the evidence of tiny data sets could want: the ranges must not decide. */
const WIDE: Ranges = { precision: { least: 1e-8, most: 1e12 }, noiseStd: { least: 1e-9, most: 1e6 } }
const LINKS: readonly Link[] = ['probit', 'pairwise', 'bridge', 'bridge_norm', 'mc']

export function compare({ curve, cases }: Cases): Difference[] {
  return cases.flatMap((each) => {
    const computed = compute(each, curve)
    return Object.entries(computed).map(([quantity, values]) => ({
      name: each.inputs.name,
      quantity,
      error: relative(values, flat(each.answers[quantity])),
    }))
  })
}

/** Every quantity that a case has an answer for, by the core's own functions. */
function compute(each: Case, curve: readonly number[]): Record<string, ArrayLike<number>> {
  const { inputs } = each
  const network = new Network(inputs.widths)
  const theta = Float64Array.from(inputs.theta)
  const data: Data = { x: Matrix.of(inputs.x), y: inputs.y }
  const classes = network.nOutputs > 1
  const likelihood = classes ? new Categorical() : new Gaussian(inputs.noise_std)
  const at = spectrum(inputs.structure, network, theta, likelihood, data)
  const posterior: Posterior = { theta, spectrum: at, precision: inputs.precision }
  const logLik = logLikelihood(network, theta, likelihood, data)
  const setting: Setting = { each, network, theta, data, likelihood, posterior }
  return {
    log_evidence: [logEvidence(logLik, at, theta, inputs.precision).total],
    effective_dimension: [effectiveDimension(at, inputs.precision)],
    curve: curve.map((delta) => logEvidence(logLik, at, theta, delta).total),
    marginal_variance: marginalVariance(posterior),
    ...trainingOf(setting),
    ...bestOf(setting),
    ...predictionsOf(setting),
  }
}

interface Setting {
  readonly each: Case
  readonly network: Network
  readonly theta: Float64Array
  readonly data: Data
  readonly likelihood: Likelihood
  readonly posterior: Posterior
}

function trainingOf({ each, network, theta, data }: Setting): Record<string, ArrayLike<number>> {
  const unit = network.nOutputs > 1 ? new Categorical() : new Gaussian(1)
  const { decay } = each.inputs
  const training = new Training(network, theta.slice(), unit, data, decay, { steps: 10, rate: 0.02 })
  while (!training.finished) training.step()
  return {
    loss: [loss(network, theta, unit, data, decay)],
    gradient: gradient(network, theta, unit, data, decay),
    after_training: training.theta,
  }
}

function bestOf({ each, network, theta, data, posterior }: Setting): Record<string, ArrayLike<number>> {
  const { structure } = each.inputs
  if (network.nOutputs > 1) {
    const precision = bestPrecision(posterior.spectrum, theta, WIDE.precision)
    const logLik = logLikelihood(network, theta, new Categorical(), data)
    const total = logEvidence(logLik, posterior.spectrum, theta, precision).total
    return { best_precision: [precision], best_log_evidence: [total] }
  }
  const unit = spectrum(structure, network, theta, new Gaussian(1), data)
  const f = network.outputs(theta, data.x).data
  const squaredErrors = squared(f.map((fn, n) => data.y[n] - fn))
  const found = bestPrecisionAndNoise({ unit, squaredNorm: squaredNorm(unit, theta), squaredErrors, n: data.y.length }, WIDE)
  const likelihood = new Gaussian(found.noiseStd)
  const at = spectrum(structure, network, theta, likelihood, data)
  const total = logEvidence(logLikelihood(network, theta, likelihood, data), at, theta, found.precision).total
  return { best_precision: [found.precision], best_noise_std: [found.noiseStd], best_log_evidence: [total] }
}

function predictionsOf({ each, network, theta, posterior }: Setting): Record<string, ArrayLike<number>> {
  const { inputs, answers } = each
  const x = Matrix.of(inputs.at)
  const { f, J } = network.jacobian(theta, x)
  const seen = probe(posterior.spectrum, f, J)
  const gaussian = outputGaussian(posterior, seen)
  const covariances = gaussian.cov.flatMap((V) => [...V.data])
  // Lapwing's own draws of the weights, taken back to the coordinates that this core draws in.
  const eps = coordinatesOf(answers.draws as number[][], posterior)
  const draws = weightDraws(posterior, eps)
  const sampled = sampledOutputs(network, draws, x)
  const shared = {
    outputs: f.data,
    covariances,
    joint_covariance: jointCovariance(posterior, network, Matrix.of(inputs.at.slice(0, 3))),
    functions: functionDraws(posterior, seen, eps).flatMap((m) => [...m.data]),
  }
  if (network.nOutputs > 1) {
    const points = Matrix.of(inputs.eps)
    const byLink = LINKS.map((link) => {
      const p = gaussian.cov.flatMap((V, n) => [...probabilities(link, f.row(n), V, points)])
      return [link, p] as const
    })
    return { ...shared, ...Object.fromEntries(byLink), sampled_probs: meanProbabilities(sampled).data }
  }
  const { mean, variance } = moments(sampled)
  return {
    ...shared,
    mean: f.data,
    epistemic: covariances,
    variance: covariances.map((v) => v + inputs.noise_std ** 2),
    sampled_mean: mean,
    sampled_epistemic: variance,
  }
}

/** ε with θ = θ* + R ε: (θ − θ*) in the coordinates of the spectrum, times √(s + δ). */
function coordinatesOf(draws: number[][], { theta, spectrum: at, precision }: Posterior): Matrix {
  const made = new Matrix(draws.length, at.values.length)
  draws.forEach((draw, s) => {
    const d = Float64Array.from(draw, (t, i) => t - theta[at.start + i])
    at.values.forEach((value, k) => {
      const z = at.basis === null ? d[k] : at.basis.row(k).reduce((sum, q, i) => sum + q * d[i], 0)
      made.data[s * at.values.length + k] = z * Math.sqrt(value + precision)
    })
  })
  return made
}

/** R Rᵀ seen from a few inputs: J R is what the unit vectors do to the linearised function. */
function jointCovariance(posterior: Posterior, network: Network, x: Matrix): Float64Array {
  const p = posterior.spectrum.values.length
  const unit = new Matrix(p, p)
  for (let k = 0; k < p; k++) unit.data[k * p + k] = 1
  const { f, J } = network.jacobian(posterior.theta, x)
  const columns = functionDraws(posterior, probe(posterior.spectrum, f, J), unit)
  const k = f.data.length
  const made = new Float64Array(k * k)
  for (const draw of columns) {
    const d = draw.data.map((v, i) => v - f.data[i])
    for (let i = 0; i < k; i++) for (let j = 0; j < k; j++) made[i * k + j] += d[i] * d[j]
  }
  return made
}

/** diag P⁻¹ = Σ_k R_ik²: the squares of what the unit vectors do to the weights. */
function marginalVariance(posterior: Posterior): Float64Array {
  const { theta, spectrum: at } = posterior
  const p = at.values.length
  const unit = new Matrix(p, p)
  for (let k = 0; k < p; k++) unit.data[k * p + k] = 1
  const draws = weightDraws(posterior, unit)
  const made = new Float64Array(p)
  for (let k = 0; k < p; k++) for (let i = 0; i < p; i++) made[i] += (draws.row(k)[at.start + i] - theta[at.start + i]) ** 2
  return made
}

function relative(found: ArrayLike<number>, expected: readonly number[]): number {
  if (found.length !== expected.length) return Infinity
  let [worst, scale] = [0, 0]
  for (let i = 0; i < expected.length; i++) {
    const difference = Math.abs(found[i] - expected[i])
    if (Number.isNaN(difference)) return Infinity
    worst = Math.max(worst, difference)
    scale = Math.max(scale, Math.abs(expected[i]))
  }
  return scale > 0 ? worst / scale : worst
}

function flat(values: Nested | undefined): number[] {
  if (values === undefined) return []
  return typeof values === 'number' ? [values] : values.flatMap(flat)
}

