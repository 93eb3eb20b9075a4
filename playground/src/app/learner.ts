/** The network of one task, trained in small pieces between frames. */

import type { Data } from '../core/data'
import { Categorical, Gaussian, type Likelihood } from '../core/likelihoods'
import { Matrix } from '../core/matrix'
import { Network } from '../core/network'
import { Random } from '../core/random'
import { Training } from '../core/training'
import { DECAY, type Point, type Task, WIDTHS } from './settings'

const FRESH = { steps: 1500, rate: 0.03 }
const CHANGED = { steps: 400, rate: 0.02 }

export class Learner {
  readonly network: Network
  theta: Float64Array
  private training: Training | null = null
  private seed = 3

  constructor(
    readonly task: Task,
    public points: Point[],
  ) {
    this.network = new Network(WIDTHS[task])
    this.theta = this.freshWeights()
    this.train(FRESH)
  }

  get data(): Data {
    const classes = this.task === 'classes'
    return {
      x: Matrix.of(this.points.map((p) => (classes ? [p.x, p.y] : [p.x]))),
      y: this.points.map((p) => (classes ? p.label : p.y)),
    }
  }

  get busy(): boolean {
    return this.training !== null && !this.training.finished
  }

  get progress(): number {
    return this.training?.progress ?? 1
  }

  /** The data have changed: go on from the weights there are. */
  changed(): void {
    this.train(CHANGED)
  }

  /** Forget the weights and train from others. */
  restart(): void {
    this.seed++
    this.theta = this.freshWeights()
    this.train(FRESH)
  }

  /** Train for so long; true if the weights have moved. */
  run(milliseconds: number): boolean {
    if (this.training === null || this.training.finished) return false
    this.training.run(milliseconds)
    return true
  }

  private train(schedule: { steps: number; rate: number }): void {
    this.training =
      this.points.length > 0
        ? new Training(this.network, this.theta, trainingLikelihood(this.task), this.data, DECAY[this.task], schedule)
        : null
  }

  private freshWeights(): Float64Array {
    return this.network.start(new Random(this.seed), this.task === 'regression' ? 1.5 : 1)
  }
}

/** Squared error or cross-entropy: the noise is estimated afterwards, so training does not know it. */
export function trainingLikelihood(task: Task): Likelihood {
  return task === 'regression' ? new Gaussian(1) : new Categorical()
}
