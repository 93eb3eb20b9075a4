import { readFileSync } from 'node:fs'
import { describe, expect, it } from 'vitest'
import { chosenByEvidence, fit } from '../src/app/fitted'
import { Learner, trainingLikelihood } from '../src/app/learner'
import { Draws, numbers, picture } from '../src/app/picture'
import { DECAY, SCENARIOS, startPoints, startSettings, type Task } from '../src/app/settings'
import type { Cases } from '../src/core/compare'
import { spectrum } from '../src/core/curvature'
import { Categorical } from '../src/core/likelihoods'
import { probabilities } from '../src/core/links'
import { Matrix, squared } from '../src/core/matrix'
import { Network } from '../src/core/network'
import { outputGaussian, probe } from '../src/core/posterior'
import { gradient } from '../src/core/training'
import { boundaries } from '../src/ui/contour'
import { gridFor } from '../src/ui/scene'

function trained(task: Task): Learner {
  const learner = new Learner(task, startPoints(task))
  while (learner.busy) learner.run(1000)
  return learner
}

describe.each(['regression', 'classes'] as const)('%s, as the page starts', (task) => {
  const learner = trained(task)
  const grid = gridFor(task, false)
  const fitted = fit(learner, 'full', grid.inputs)
  const settings = { ...startSettings(), task }
  Object.assign(settings, chosenByEvidence(fitted, settings.noiseStd))
  const draws = new Draws(learner.network.nOutputs)

  it('is trained to rest', () => {
    const g = gradient(learner.network, learner.theta, trainingLikelihood(task), learner.data, DECAY[task])
    expect(Math.sqrt(squared(g))).toBeLessThan(0.05)
  })

  it('shows why one linearises: sampled weights do not fit the data they were trained on', () => {
    const { scores } = numbers(fitted, settings, draws)
    expect(scores.linearised).toBeGreaterThan(scores.network - 0.5)
    expect(scores.sampled).toBeLessThan(scores.linearised - 0.5)
  })

  it('predicts around the network when linearised', () => {
    const shown = picture(fitted, settings, draws)
    expect(shown.mean).toEqual(learner.network.outputs(learner.theta, grid.inputs).data)
  })

  it('draws the same functions until others are asked for', () => {
    const before = picture(fitted, settings, draws).draws[0].data
    expect(picture(fitted, settings, draws).draws[0].data).toEqual(before)
    draws.renew()
    expect(picture(fitted, settings, draws).draws[0].data).not.toEqual(before)
  })
})

describe('the first picture', () => {
  it('has a band that is wider in the gap and outside than at the points', () => {
    const learner = trained('regression')
    const fitted = fit(learner, 'full', Matrix.of([[-2], [0], [1.5], [3.8]]))
    const settings = { ...startSettings(), ...chosenByEvidence(fitted, 0.2) }
    const [left, gap, right, outside] = picture(fitted, settings, new Draws(1)).variance
    expect(Math.min(gap, outside)).toBeGreaterThan(25 * Math.max(left, right))
  })
})

describe('Monte Carlo with the points of the page', () => {
  const { cases } = JSON.parse(readFileSync(new URL('cases.json', import.meta.url), 'utf-8')) as Cases

  it.each(cases.filter(({ answers }) => 'mc_many' in answers))("is near Lapwing's: $inputs.name", ({ inputs, answers }) => {
    const network = new Network(inputs.widths)
    const theta = Float64Array.from(inputs.theta)
    const data = { x: Matrix.of(inputs.x), y: inputs.y }
    const at = spectrum(inputs.structure, network, theta, new Categorical(), data)
    const { f, J } = network.jacobian(theta, Matrix.of(inputs.at))
    const { cov } = outputGaussian({ theta, spectrum: at, precision: inputs.precision }, probe(at, f, J))
    const points = new Draws(network.nOutputs).monteCarlo
    const expected = answers.mc_many as number[][]
    const differences = cov.flatMap((V, n) => {
      const p = probabilities('mc', f.row(n), V, points)
      return Array.from(p, (pk, k) => Math.abs(pk - expected[n][k]))
    })
    // 128 antithetic points have a standard error of at most 0.5 / √64.
    expect(Math.max(...differences)).toBeLessThan(0.1)
  })
})

describe('boundaries between classes', () => {
  const xs = Array.from({ length: 41 }, (_, i) => -2 + i / 10)

  it('lie where two linear functions are equal and no third is larger', () => {
    // Largest on the left, on the right and above: three rays from one point.
    const f = (x: number, y: number): number[] => [-2 * x - y, 2 * x - y, 2 * y]
    const values = Matrix.of(xs.flatMap((y) => xs.map((x) => f(x, y))))
    const pieces = boundaries(values, { xs, ys: xs })
    expect(pieces.length).toBeGreaterThan(40)
    for (const [x1, y1, x2, y2] of pieces) {
      for (const [x, y] of [[x1, y1], [x2, y2]]) {
        const sorted = f(x, y).sort((a, b) => b - a)
        expect(sorted[0] - sorted[1]).toBeLessThan(1e-9)
      }
    }
  })

  it('are none where one class is largest everywhere', () => {
    const values = Matrix.of(xs.flatMap(() => xs.map(() => [3, 1, 2])))
    expect(boundaries(values, { xs, ys: xs })).toEqual([])
  })
})

describe('situations worth trying', () => {
  it('have names of their own and settings within reach', () => {
    expect(new Set(SCENARIOS.map(({ id }) => id)).size).toBe(SCENARIOS.length)
    for (const { settings } of SCENARIOS) {
      if (settings.automatic === false) expect(settings.precision).toBeDefined()
    }
  })
})
