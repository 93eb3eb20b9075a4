/** The words that change with what is shown. */

import type { Structure } from '../core/curvature'
import type { Link } from '../core/links'
import type { Numbers } from '../app/picture'
import { CLASS_NAMES, type Settings } from '../app/settings'
import { short } from './curve'

export const STRUCTURE_TEXT: Readonly<Record<Structure, string>> = {
  full: 'Every pair of weights: structure="full". Exact for the linearised network; memory grows with the square of the number of weights, which is why large models use “kron” instead.',
  diag: 'Each weight for itself: structure="diag". Cheap, but blind to weights that make up for each other, so the band is too wide on the data and says little of the gaps.',
  last_layer: 'Only the last layer is uncertain: params="last_layer". The features before it count as known, so the band follows what they can express.',
}

export const LINK_TEXT: Readonly<Record<Link, string>> = {
  mc: 'Averages the softmax over draws of the outputs: right up to its sampling error, and the default of Lapwing.',
  pairwise: 'A closed form: compares the classes two by two. Close to Monte Carlo, without draws.',
  probit: 'A closed form: every output is shrunk by its own variance. Ignores that outputs move together.',
  bridge: 'A closed form: the mean of the matching Dirichlet distribution. Unreliable where variances are large.',
  bridge_norm: 'The Laplace bridge with the variances rescaled first, which keeps it off its bad region.',
  none: 'Softmax of the network’s outputs as they are. This is what you have without Lapwing: sure of itself far away.',
}

interface LegendEntry {
  readonly kind: string
  readonly words: string
}

export function legend({ task, predictive, draws }: Settings): LegendEntry[] {
  const who = predictive === 'linearised' ? 'the linearised network' : 'networks with sampled weights'
  const lines = draws ? [{ kind: 'draw', words: task === 'classes' ? `boundaries of draws of ${who}` : `draws of ${who}` }] : []
  if (task === 'classes') {
    return [
      { kind: 'map', words: 'strong colour: sure of the class; faint: not sure' },
      { kind: 'mean', words: 'boundary between the likeliest classes' },
      ...lines,
    ]
  }
  return [
    { kind: 'mean', words: predictive === 'linearised' ? 'the network’s own prediction' : `mean of ${who}` },
    { kind: 'epistemic', words: '± 2 standard deviations of the function: what the data leave open' },
    { kind: 'total', words: 'with the noise of a new measurement' },
    ...lines,
  ]
}

/** What someone who cannot see the picture is told about it. */
export function described(settings: Settings, numbers: Numbers, uncertainty: string): string {
  const { precision, noiseStd, automatic, task } = settings
  const values =
    task === 'regression' ? `prior precision ${short(precision)} and noise ${short(noiseStd)}` : `prior precision ${short(precision)}`
  const chosen = automatic ? `${values}, chosen by the evidence` : values
  const evidence = numbers.evidence.total.toFixed(1).replace('-', '−')
  return `${uncertainty} ${chosen[0].toUpperCase()}${chosen.slice(1)}. Log evidence ${evidence}.`
}

/** The band at three places. */
export function bandInWords(xs: readonly number[], mean: Float64Array, variance: Float64Array): string {
  const places = [-3, 0, 3].map((x) => {
    const i = xs.reduce((best, v, k) => (Math.abs(v - x) < Math.abs(xs[best] - x) ? k : best), 0)
    return `at x = ${x}: ${mean[i].toFixed(2)} ± ${(2 * Math.sqrt(variance[i])).toFixed(2)}`
  })
  return `Predictions ${places.join('; ')}.`.replaceAll('-', '−')
}

/** How much of the plane is sure of a class, and which classes hold it. */
export function mapInWords(probs: { rows: number; row(n: number): Float64Array }): string {
  const held = CLASS_NAMES.map(() => 0)
  let sure = 0
  for (let n = 0; n < probs.rows; n++) {
    const p = probs.row(n)
    const most = Math.max(...p)
    held[p.indexOf(most)]++
    if (most > 0.9) sure++
  }
  const percent = (count: number): string => `${Math.round((100 * count) / probs.rows)} %`
  const areas = CLASS_NAMES.map((name, k) => `${name} ${percent(held[k])}`).join(', ')
  return `More than 90 % sure of a class on ${percent(sure)} of the plane. Likeliest class by area: ${areas}.`
}
