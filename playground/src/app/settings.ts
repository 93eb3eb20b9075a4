/** What a reader can move, the data they start from, and the situations worth trying. */

import type { Structure } from '../core/curvature'
import type { Ranges } from '../core/evidence'
import type { Link } from '../core/links'
import { Random } from '../core/random'

export type Task = 'regression' | 'classes'
export type Predictive = 'linearised' | 'sampled'

/** A place in the plane; for classes `label` says which class, for regression y is the target. */
export interface Point {
  x: number
  y: number
  label: number
}

export interface Settings {
  task: Task
  predictive: Predictive
  structure: Structure
  link: Link
  /** Chosen by the evidence as long as this is set. */
  automatic: boolean
  precision: number
  noiseStd: number
  draws: boolean
  /** Class of the points that are added. */
  label: number
}

export const CLASS_NAMES = ['A', 'B', 'C'] as const

/** The plane that is shown: both axes in the same units. */
export const VIEW = { x: 4, y: 2.75 } as const

export const RANGES: Ranges = {
  precision: { least: 1e-3, most: 1e3 },
  noiseStd: { least: 0.02, most: 2 },
}

export const WIDTHS: Readonly<Record<Task, readonly number[]>> = {
  regression: [1, 10, 10, 1],
  classes: [2, 10, 10, 3],
}

/** Weight decay in training, on the sum of the losses. Classes that can be told apart need more: nothing else stops their logits. */
export const DECAY: Readonly<Record<Task, number>> = { regression: 0.01, classes: 0.2 }

export const MOST_POINTS = 80

export function startSettings(): Settings {
  return {
    task: 'regression',
    predictive: 'linearised',
    structure: 'full',
    link: 'mc',
    automatic: true,
    precision: 1,
    noiseStd: 0.2,
    draws: true,
    label: 0,
  }
}

export function startPoints(task: Task): Point[] {
  const random = new Random(task === 'regression' ? 11 : 5)
  return task === 'regression' ? gapData(random) : clusters(random)
}

/** Two groups of points along a curve, with nothing between them. */
function gapData(random: Random): Point[] {
  const places = [-2.7, -2.5, -2.25, -2.05, -1.85, -1.6, -1.4, -1.2, 0.9, 1.1, 1.3, 1.55, 1.75, 2.0, 2.2, 2.4]
  return places.map((x) => ({ x, y: round(1.2 * Math.sin(1.5 * x) + 0.15 * random.normal()), label: 0 }))
}

function clusters(random: Random): Point[] {
  const centres = [
    [-1.2, 0.5],
    [1.0, 0.8],
    [0.1, -1.0],
  ]
  return centres.flatMap(([x, y], label) =>
    Array.from({ length: 10 }, () => ({
      x: round(x + 0.5 * random.normal()),
      y: round(y + 0.4 * random.normal()),
      label,
    })),
  )
}

export function round(value: number): number {
  return Math.round(value * 100) / 100
}

export interface Scenario {
  readonly id: string
  readonly title: string
  /** What to look at and do, in words. */
  readonly text: string
  readonly settings: Partial<Settings>
}

export const SCENARIOS: readonly Scenario[] = [
  {
    id: 'gap',
    title: 'A gap in the data',
    text: 'The dark band is narrow where there are points and wide where there are none: between the two groups and beyond both ends. Drag a point into the gap and watch the band close around it. The network’s own curve tells you nothing of this: it is as smooth inside the gap as outside.',
    settings: { task: 'regression', predictive: 'linearised', structure: 'full', automatic: true, draws: true },
  },
  {
    id: 'linearise',
    title: 'Why linearise?',
    text: 'This draws weights from the same Gaussian, but runs them through the real network. Its curves miss the very points it was trained on, and the log-likelihood in the table below collapses. The Gaussian was fitted to the network’s tangent (its linearisation), so it is right only there. Switch “Predict with” back and forth.',
    settings: { task: 'regression', predictive: 'sampled', structure: 'full', automatic: true, draws: true },
  },
  {
    id: 'weak',
    title: 'A prior that is too weak',
    text: 'A small prior precision lets the weights go almost anywhere that the data do not forbid, so the band opens as soon as the points end. The evidence curve below says so: this setting is far down its left side. Tick “Let the evidence choose” to go back to the top.',
    settings: {
      task: 'regression',
      predictive: 'linearised',
      structure: 'full',
      automatic: false,
      precision: 0.003,
      noiseStd: 0.1,
    },
  },
  {
    id: 'structures',
    title: 'Cheaper structures',
    text: 'The diagonal forgets how weights make up for each other: two that always cancel look free, each for itself. So the band is about as wide on the points as in the gap. Now choose “Full”, which knows better, and “Last layer”, which is cheap and sees part of it. Prior and noise are the same for all three here; look what the evidence says of each.',
    settings: {
      task: 'regression',
      predictive: 'linearised',
      structure: 'diag',
      automatic: false,
      precision: 0.43,
      noiseStd: 0.1,
      draws: true,
    },
  },
  {
    id: 'confident',
    title: 'Confident far from the data',
    text: 'This is the plain network: softmax of its outputs, no error bars. Strong colour means near certainty, and it stays strong at the edges, where nothing was ever seen. Now set “Link” to Monte Carlo: the colours fade away from the points.',
    settings: { task: 'classes', predictive: 'linearised', structure: 'full', link: 'none', automatic: true, draws: false },
  },
  {
    id: 'boundaries',
    title: 'Boundaries that could have been',
    text: 'Each thin line is the class boundary of one draw of the function. They agree between the groups of points and fan out where no data hold them. Move or remove points at the border and see which lines become possible. Drag one point of a class into another class, too.',
    settings: { task: 'classes', predictive: 'linearised', structure: 'full', link: 'mc', automatic: true, draws: true },
  },
]
