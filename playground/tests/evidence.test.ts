import { describe, expect, it } from 'vitest'
import type { Spectrum } from '../src/core/curvature'
import { bestPrecision, bestPrecisionAndNoise, type Fit, logEvidence, type Ranges } from '../src/core/evidence'
import { Random } from '../src/core/random'

const RANGES: Ranges = { precision: { least: 1e-3, most: 1e3 }, noiseStd: { least: 0.02, most: 2 } }

/** A fit with random eigenvalues over many orders of magnitude, like those of a network. */
function randomFit(seed: number): Fit {
  const random = new Random(seed)
  const n = 2 + Math.floor(20 * random.uniform())
  const values = Float64Array.from({ length: 30 }, (_, i) => (i < n ? 10 ** (4 * random.normal()) : 0))
  return {
    unit: { start: 0, values, basis: null },
    squaredNorm: 10 ** (1 + random.normal()),
    squaredErrors: n * 10 ** (-2 + random.normal()),
    n,
  }
}

function evidence(fit: Fit, precision: number, noiseStd: number): number {
  const beta = noiseStd ** -2
  const at: Spectrum = { ...fit.unit, values: fit.unit.values.map((s) => beta * s) }
  const theta = Float64Array.of(Math.sqrt(fit.squaredNorm))
  const logLik = 0.5 * fit.n * Math.log(beta / (2 * Math.PI)) - 0.5 * beta * fit.squaredErrors
  return logEvidence(logLik, at, theta, precision).total
}

function grid(least: number, most: number, n = 60): number[] {
  return Array.from({ length: n + 1 }, (_, i) => least * (most / least) ** (i / n))
}

describe('the highest evidence', () => {
  it.each(Array.from({ length: 40 }, (_, seed) => seed))('is not below any of a grid, seed %i', (seed) => {
    const fit = randomFit(seed)
    const best = bestPrecisionAndNoise(fit, RANGES)
    expect(best.precision).toBeGreaterThanOrEqual(RANGES.precision.least)
    expect(best.precision).toBeLessThanOrEqual(RANGES.precision.most)
    expect(best.noiseStd).toBeGreaterThanOrEqual(RANGES.noiseStd.least)
    expect(best.noiseStd).toBeLessThanOrEqual(RANGES.noiseStd.most)
    const found = evidence(fit, best.precision, best.noiseStd)
    const most = Math.max(
      ...grid(1e-3, 1e3).flatMap((delta) => grid(0.02, 2).map((sigma) => evidence(fit, delta, sigma))),
    )
    expect(found).toBeGreaterThanOrEqual(most - 1e-9)
  })

  it('is found for a fixed noise too', () => {
    const fit = randomFit(3)
    const theta = Float64Array.of(Math.sqrt(fit.squaredNorm))
    const best = bestPrecision(fit.unit, theta, RANGES.precision)
    const most = Math.max(...grid(1e-3, 1e3).map((delta) => logEvidence(0, fit.unit, theta, delta).total))
    expect(logEvidence(0, fit.unit, theta, best).total).toBeGreaterThanOrEqual(most - 1e-9)
  })

  it('stays within the ranges where there is no maximum: no errors, no curvature, no data', () => {
    const none: Fit = { unit: { start: 0, values: new Float64Array(5), basis: null }, squaredNorm: 0, squaredErrors: 0, n: 0 }
    for (const fit of [none, { ...none, n: 3 }, { ...randomFit(1), squaredErrors: 0 }, { ...randomFit(1), squaredNorm: 0 }]) {
      const { precision, noiseStd } = bestPrecisionAndNoise(fit, RANGES)
      expect(precision >= 1e-3 && precision <= 1e3 && noiseStd >= 0.02 && noiseStd <= 2).toBe(true)
    }
  })
})
