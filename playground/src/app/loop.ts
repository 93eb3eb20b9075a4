/** What is recomputed when: weights, then curvature, then prior and noise, then the picture; only what changed. */

import type { Matrix } from '../core/matrix'
import { chosenByEvidence, fit, type Fitted } from './fitted'
import { Learner } from './learner'
import { Draws, type Numbers, numbers, picture, type Picture } from './picture'
import { type Settings, startPoints, type Task } from './settings'

/** Milliseconds of training in a frame: the rest is for the picture. */
const TRAINING = 8
const TRAINING_STILL = 400

export interface View<G> {
  readonly fitted: Fitted
  readonly picture: Picture
  readonly grid: G
  /** Only when the network is at rest: they change too fast to be read before. */
  readonly numbers: Numbers | null
}

export interface Show<G> {
  grid(task: Task, fine: boolean): G
  show(view: View<G>): void
  /** There is no data. */
  empty(): void
}

export class Loop<G extends { readonly inputs: Matrix }> {
  private readonly learners: Record<Task, Learner> = {
    regression: new Learner('regression', startPoints('regression')),
    classes: new Learner('classes', startPoints('classes')),
  }
  private readonly draws = { regression: new Draws(1), classes: new Draws(3) }
  private fitted: { value: Fitted; grid: G; fine: boolean; key: string } | null = null
  private asked = false

  constructor(
    private readonly settings: Settings,
    private readonly screen: Show<G>,
    private readonly still: boolean,
  ) {}

  get learner(): Learner {
    return this.learners[this.settings.task]
  }

  /** Points of the current task were changed. */
  pointsChanged(): void {
    this.learner.changed()
    this.weightsChanged()
  }

  resetPoints(): void {
    const learner = this.learner
    learner.points.splice(0, learner.points.length, ...startPoints(learner.task))
    this.pointsChanged()
  }

  retrain(): void {
    this.learner.restart()
    this.weightsChanged()
  }

  newDraws(): void {
    this.draws[this.settings.task].renew()
    this.ask()
  }

  /** A setting was moved: draw again in the next frame. */
  ask(): void {
    document.documentElement.dataset.state = 'busy'
    if (this.asked) return
    this.asked = true
    requestAnimationFrame(() => this.frame())
  }

  private weightsChanged(): void {
    this.fitted = null
    this.ask()
  }

  private frame(): void {
    this.asked = false
    if (this.learner.run(this.still ? TRAINING_STILL : TRAINING)) this.fitted = null
    const fine = !this.learner.busy
    if (this.learner.points.length === 0) this.screen.empty()
    else if (fine || !this.still) this.draw(fine)
    if (!fine) this.ask()
    else document.documentElement.dataset.state = 'settled'
  }

  private draw(fine: boolean): void {
    const { settings } = this
    const key = `${settings.task} ${settings.structure}`
    if (this.fitted === null || this.fitted.key !== key || this.fitted.fine !== fine) {
      const grid = this.screen.grid(settings.task, fine)
      this.fitted = { value: fit(this.learner, settings.structure, grid.inputs), grid, fine, key }
    }
    const { value: fitted, grid } = this.fitted
    if (settings.automatic) Object.assign(settings, chosenByEvidence(fitted, settings.noiseStd))
    const draws = this.draws[settings.task]
    this.screen.show({
      fitted,
      grid,
      picture: picture(fitted, settings, draws),
      numbers: fine ? numbers(fitted, settings, draws) : null,
    })
  }
}
