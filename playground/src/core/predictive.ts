/** Predictions by networks with sampled weights, and how well predictions of either kind fit the data. */

import { Gaussian, logSumExp, softmax } from './likelihoods'
import { Matrix } from './matrix'
import type { Network } from './network'

/** f(x; θ_s) for every draw of the weights: one (N, C) matrix a draw. Nothing is linearised. */
export function sampledOutputs(network: Network, draws: Matrix, x: Matrix): Matrix[] {
  return Array.from({ length: draws.rows }, (_, s) => network.outputs(draws.row(s), x))
}

/** Mean and variance over draws, entry by entry. */
export function moments(draws: readonly Matrix[]): { mean: Float64Array; variance: Float64Array } {
  const size = draws[0].data.length
  const mean = new Float64Array(size)
  const variance = new Float64Array(size)
  for (const draw of draws) for (let i = 0; i < size; i++) mean[i] += draw.data[i] / draws.length
  for (const draw of draws) for (let i = 0; i < size; i++) variance[i] += (draw.data[i] - mean[i]) ** 2 / draws.length
  return { mean, variance }
}

/** The mean of softmax over draws: (N, C). */
export function meanProbabilities(draws: readonly Matrix[]): Matrix {
  const made = new Matrix(draws[0].rows, draws[0].cols)
  for (const draw of draws) {
    for (let n = 0; n < draw.rows; n++) {
      const p = softmax(draw.row(n))
      const row = made.row(n)
      for (let k = 0; k < p.length; k++) row[k] += p[k] / draws.length
    }
  }
  return made
}

/** Mean over data of log p(yₙ), where p is N(mₙ, vₙ + σ²). */
export function gaussianScore(mean: Float64Array, variance: Float64Array, noiseStd: number, y: readonly number[]): number {
  const scores = y.map((yn, n) => {
    const std = Math.sqrt(variance[n] + noiseStd ** 2)
    return new Gaussian(std).logProb(Float64Array.of(mean[n]), yn)
  })
  return average(scores)
}

/** Mean over data of log mean_s N(yₙ; f_s(xₙ), σ²): a mixture of the draws. */
export function mixtureScore(draws: readonly Matrix[], noiseStd: number, y: readonly number[]): number {
  const likelihood = new Gaussian(noiseStd)
  const scores = y.map((yn, n) => {
    const each = Float64Array.from(draws, (draw) => likelihood.logProb(draw.row(n), yn))
    return logSumExp(each) - Math.log(draws.length)
  })
  return average(scores)
}

/** Mean over data of log p(yₙ) for class probabilities (N, C). */
export function classScore(probabilities: Matrix, y: readonly number[]): number {
  return average(y.map((yn, n) => Math.log(probabilities.row(n)[yn])))
}

function average(values: readonly number[]): number {
  return values.reduce((a, b) => a + b, 0) / values.length
}
