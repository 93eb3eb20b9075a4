/** From a posterior to what is drawn and said: a band or a class map, draws, the evidence curves, the scores. */

import { effectiveDimension, type Evidence, type Hyperparameters } from '../core/evidence'
import { softmax } from '../core/likelihoods'
import { type Link, probabilities } from '../core/links'
import { Matrix } from '../core/matrix'
import { functionDraws, outputGaussian, type Posterior, type Probe, weightDraws } from '../core/posterior'
import { classScore, gaussianScore, meanProbabilities, mixtureScore, moments, sampledOutputs } from '../core/predictive'
import { Random } from '../core/random'
import { evidenceAt, type Fitted, posteriorAt } from './fitted'
import { RANGES, type Settings } from './settings'

export const N_SHOWN = 8
const N_SAMPLED = 100
const N_MONTE_CARLO = 128
const N_CURVE = 61

export interface Picture {
  /** Mean and variance of the function at the grid (regression). */
  readonly mean: Float64Array
  readonly variance: Float64Array
  /** Class probabilities at the grid (classes). */
  readonly probs: Matrix
  /** Functions drawn from the posterior, at the grid: outputs or logits. */
  readonly draws: readonly Matrix[]
}

/** Mean log-likelihood of the training points, by who predicts. */
export interface Scores {
  readonly network: number
  readonly linearised: number
  readonly sampled: number
}

export interface Curve {
  readonly at: readonly number[]
  readonly logEvidence: readonly number[]
}

export interface Numbers {
  readonly evidence: Evidence
  readonly effective: number
  readonly nWeights: number
  readonly scores: Scores
  readonly overPrecision: Curve
  readonly overNoise: Curve | null
}

/** The same random numbers until new draws are asked for, so draws move smoothly with every slider. */
export class Draws {
  readonly monteCarlo: Matrix
  private seed = 1
  private kept: Matrix | null = null

  constructor(nClasses: number) {
    this.monteCarlo = antithetic(new Random(2), N_MONTE_CARLO, nClasses)
  }

  renew(): void {
    this.seed++
    this.kept = null
  }

  /** ε (N_SAMPLED, P); the first N_SHOWN are drawn as lines. */
  eps(p: number): Matrix {
    if (this.kept?.cols !== p) this.kept = new Matrix(N_SAMPLED, p, new Random(this.seed).normals(N_SAMPLED * p))
    return this.kept
  }
}

export function picture(fitted: Fitted, settings: Settings, draws: Draws): Picture {
  const posterior = posteriorAt(fitted, settings)
  const eps = draws.eps(posterior.spectrum.values.length)
  return settings.predictive === 'linearised'
    ? linearised(fitted.onGrid, posterior, settings.link, draws.monteCarlo, firstRows(eps, N_SHOWN))
    : sampled(fitted, posterior, eps, fitted.grid)
}

function linearised(seen: Probe, posterior: Posterior, link: Link, points: Matrix, eps: Matrix): Picture {
  const { mean, cov } = outputGaussian(posterior, seen)
  const shown = functionDraws(posterior, seen, eps)
  if (mean.cols === 1) {
    return { mean: mean.data, variance: Float64Array.from(cov, (V) => V.data[0]), probs: mean, draws: shown }
  }
  return { mean: mean.data, variance: new Float64Array(0), probs: byLink(link, mean, cov, points), draws: shown }
}

function sampled(fitted: Fitted, posterior: Posterior, eps: Matrix, x: Matrix): Picture {
  const all = sampledOutputs(fitted.learner.network, weightDraws(posterior, eps), x)
  const probs = all[0].cols > 1 ? meanProbabilities(all) : all[0]
  return { ...moments(all), probs, draws: all.slice(0, N_SHOWN) }
}

function byLink(link: Link, mean: Matrix, cov: readonly Matrix[], points: Matrix): Matrix {
  const made = new Matrix(mean.rows, mean.cols)
  cov.forEach((V, n) => made.row(n).set(probabilities(link, mean.row(n), V, points)))
  return made
}

export function numbers(fitted: Fitted, settings: Settings, draws: Draws): Numbers {
  const posterior = posteriorAt(fitted, settings)
  return {
    evidence: evidenceAt(fitted, settings),
    effective: effectiveDimension(posterior.spectrum, settings.precision),
    nWeights: posterior.spectrum.values.length,
    scores: scores(fitted, posterior, settings, draws),
    overPrecision: curve(fitted, settings, 'precision'),
    overNoise: fitted.task === 'regression' ? curve(fitted, settings, 'noiseStd') : null,
  }
}

function scores(fitted: Fitted, posterior: Posterior, settings: Settings, draws: Draws): Scores {
  const { y } = fitted.data
  const { mean, cov } = outputGaussian(posterior, fitted.onData)
  const eps = draws.eps(posterior.spectrum.values.length)
  const all = sampledOutputs(fitted.learner.network, weightDraws(posterior, eps), fitted.data.x)
  if (fitted.task === 'regression') {
    const { noiseStd } = settings
    const variance = Float64Array.from(cov, (V) => V.data[0])
    return {
      network: gaussianScore(mean.data, new Float64Array(y.length), noiseStd, y),
      linearised: gaussianScore(mean.data, variance, noiseStd, y),
      sampled: mixtureScore(all, noiseStd, y),
    }
  }
  return {
    network: classScore(plain(mean), y),
    linearised: classScore(byLink(settings.link === 'none' ? 'mc' : settings.link, mean, cov, draws.monteCarlo), y),
    sampled: classScore(meanProbabilities(all), y),
  }
}

/** The evidence along one hyperparameter, the other as it is. */
function curve(fitted: Fitted, now: Hyperparameters, which: 'precision' | 'noiseStd'): Curve {
  const { least, most } = RANGES[which]
  const at = Array.from({ length: N_CURVE }, (_, i) => least * (most / least) ** (i / (N_CURVE - 1)))
  return { at, logEvidence: at.map((v) => evidenceAt(fitted, { ...now, [which]: v }).total) }
}

function plain(f: Matrix): Matrix {
  const made = new Matrix(f.rows, f.cols)
  for (let n = 0; n < f.rows; n++) made.row(n).set(softmax(f.row(n)))
  return made
}

function firstRows(m: Matrix, n: number): Matrix {
  return new Matrix(n, m.cols, m.data.subarray(0, n * m.cols))
}

/** n standard normal points, each with its opposite: odd moments are exact. */
function antithetic(random: Random, n: number, c: number): Matrix {
  const made = new Matrix(n, c)
  for (let s = 0; s < n; s += 2) {
    for (let k = 0; k < c; k++) {
      made.data[s * c + k] = random.normal()
      made.data[(s + 1) * c + k] = -made.data[s * c + k]
    }
  }
  return made
}
