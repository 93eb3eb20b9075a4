/** A Laplace posterior on the weights as they are: what changes with the data, and not with prior or noise. */

import { scaledSpectrum, spectrum, squaredNorm, type Spectrum, type Structure } from '../core/curvature'
import type { Data } from '../core/data'
import { bestPrecision, bestPrecisionAndNoise, type Evidence, type Hyperparameters, logEvidence } from '../core/evidence'
import { Categorical, Gaussian } from '../core/likelihoods'
import { Matrix, squared } from '../core/matrix'
import { type Posterior, probe, type Probe } from '../core/posterior'
import { logLikelihood } from '../core/training'
import type { Learner } from './learner'
import { RANGES, type Task } from './settings'

export interface Fitted {
  readonly task: Task
  readonly learner: Learner
  readonly theta: Float64Array
  readonly data: Data
  /** H at noise 1. */
  readonly unit: Spectrum
  readonly squaredErrors: number
  /** Inputs at which the picture is drawn, and the training inputs. */
  readonly grid: Matrix
  readonly onGrid: Probe
  readonly onData: Probe
}

export function fit(learner: Learner, structure: Structure, grid: Matrix): Fitted {
  const { network, data, task } = learner
  const theta = learner.theta.slice()
  const likelihood = task === 'regression' ? new Gaussian(1) : new Categorical()
  const unit = spectrum(structure, network, theta, likelihood, data)
  const see = (x: Matrix): Probe => {
    const { f, J } = network.jacobian(theta, x)
    return probe(unit, f, J)
  }
  const onData = see(data.x)
  const squaredErrors = task === 'regression' ? squared(onData.f.data.map((f, n) => data.y[n] - f)) : 0
  return { task, learner, theta, data, unit, squaredErrors, grid, onGrid: see(grid), onData }
}

/** H under this noise. */
export function spectrumAt(fitted: Fitted, noiseStd: number): Spectrum {
  return fitted.task === 'regression' ? scaledSpectrum(fitted.unit, 1 / noiseStd ** 2) : fitted.unit
}

export function posteriorAt(fitted: Fitted, { precision, noiseStd }: Hyperparameters): Posterior {
  return { theta: fitted.theta, spectrum: spectrumAt(fitted, noiseStd), precision }
}

export function evidenceAt(fitted: Fitted, { precision, noiseStd }: Hyperparameters): Evidence {
  const likelihood = fitted.task === 'regression' ? new Gaussian(noiseStd) : new Categorical()
  const logLik = logLikelihood(fitted.learner.network, fitted.theta, likelihood, fitted.data)
  return logEvidence(logLik, spectrumAt(fitted, noiseStd), fitted.theta, precision)
}

/** Prior precision and noise of the highest evidence, within what the sliders reach. */
export function chosenByEvidence(fitted: Fitted, noiseStd: number): Hyperparameters {
  const { unit, theta, squaredErrors, data } = fitted
  if (fitted.task === 'classes') return { precision: bestPrecision(unit, theta, RANGES.precision), noiseStd }
  const norm = squaredNorm(unit, theta)
  return bestPrecisionAndNoise({ unit, squaredNorm: norm, squaredErrors, n: data.y.length }, RANGES)
}
