/** Full-batch Adam on the penalised loss: what a training script does, on a network small enough for every frame. */

import type { Data } from './data'
import type { Likelihood } from './likelihoods'
import { squared } from './matrix'
import type { Network } from './network'

/** −Σ log p(yₙ | f(xₙ)) + ½ λ ‖θ‖². */
export function loss(network: Network, theta: Float64Array, likelihood: Likelihood, data: Data, decay: number): number {
  return 0.5 * decay * squared(theta) - logLikelihood(network, theta, likelihood, data)
}

export function logLikelihood(network: Network, theta: Float64Array, likelihood: Likelihood, data: Data): number {
  const f = network.outputs(theta, data.x)
  return data.y.reduce((total, y, n) => total + likelihood.logProb(f.row(n), y), 0)
}

/** Its gradient in θ. */
export function gradient(
  network: Network,
  theta: Float64Array,
  likelihood: Likelihood,
  data: Data,
  decay: number,
): Float64Array {
  const g = theta.map((t) => decay * t)
  const pull = (f: Float64Array, n: number): Float64Array => likelihood.residual(f, data.y[n]).map((r) => -r)
  network.addPullback(theta, data.x, pull, g)
  return g
}

export interface Schedule {
  readonly steps: number
  readonly rate: number
}

/** One training run: the rate falls from its start to zero along half a cosine, so it ends at rest. */
export class Training {
  private readonly first: Float64Array
  private readonly second: Float64Array
  private done = 0

  constructor(
    private readonly network: Network,
    readonly theta: Float64Array,
    private readonly likelihood: Likelihood,
    private readonly data: Data,
    private readonly decay: number,
    private readonly schedule: Schedule,
  ) {
    this.first = new Float64Array(theta.length)
    this.second = new Float64Array(theta.length)
  }

  get finished(): boolean {
    return this.done >= this.schedule.steps
  }

  get progress(): number {
    return this.done / this.schedule.steps
  }

  /** One step of Adam (Kingma and Ba, 2015), in place on θ. */
  step(): void {
    const g = gradient(this.network, this.theta, this.likelihood, this.data, this.decay)
    const t = ++this.done
    const rate = 0.5 * this.schedule.rate * (1 + Math.cos((Math.PI * t) / this.schedule.steps))
    const [b1, b2] = [0.9, 0.99]
    for (let i = 0; i < g.length; i++) {
      this.first[i] = b1 * this.first[i] + (1 - b1) * g[i]
      this.second[i] = b2 * this.second[i] + (1 - b2) * g[i] * g[i]
      const m = this.first[i] / (1 - b1 ** t)
      const v = this.second[i] / (1 - b2 ** t)
      this.theta[i] -= (rate * m) / (Math.sqrt(v) + 1e-8)
    }
  }

  /** Steps until the time is up or the schedule is through. */
  run(milliseconds: number): void {
    const until = performance.now() + milliseconds
    while (!this.finished && performance.now() < until) this.step()
  }
}
