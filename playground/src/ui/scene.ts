/** The picture: a band and curves for regression, a map of the classes and their boundaries for classification. */

import { Matrix } from '../core/matrix'
import { type Picture } from '../app/picture'
import { type Settings, type Task, VIEW } from '../app/settings'
import { boundaries, type Lattice } from './contour'
import type { Frame } from './frame'
import { area, line, set, svg } from './svg'
import { paper, type Rgb, classColours } from './theme'

const N_LINE = 161

/** Where the picture is computed: a line of inputs, or a lattice over the plane, coarse while the network moves. */
export interface Grid extends Lattice {
  readonly inputs: Matrix
}

export function gridFor(task: Task, fine: boolean): Grid {
  if (task === 'regression') {
    const xs = Array.from({ length: N_LINE }, (_, i) => VIEW.x * ((2 * i) / (N_LINE - 1) - 1))
    return { xs, ys: [], inputs: Matrix.of(xs.map((x) => [x])) }
  }
  const [nx, ny] = fine ? [49, 34] : [25, 18]
  const xs = centres(nx, VIEW.x)
  const ys = centres(ny, VIEW.y).reverse()
  return { xs, ys, inputs: Matrix.of(ys.flatMap((y) => xs.map((x) => [x, y]))) }
}

/** The middles of n cells over [−half, half]: a canvas of n pixels stretched over the plane has them there. */
function centres(n: number, half: number): number[] {
  return Array.from({ length: n }, (_, i) => half * ((2 * i + 1) / n - 1))
}

export class Scene {
  private readonly total = svg('path', { class: 'band total' })
  private readonly epistemic = svg('path', { class: 'band epistemic' })
  private readonly draws = svg('g', { class: 'draws' })
  private readonly mean = svg('path', { class: 'mean' })

  constructor(
    under: SVGGElement,
    private readonly canvas: HTMLCanvasElement,
    private readonly frame: Frame,
  ) {
    under.append(this.total, this.epistemic, this.draws, this.mean)
  }

  show(picture: Picture, grid: Grid, settings: Settings): void {
    const classes = settings.task === 'classes'
    this.canvas.hidden = !classes
    for (const path of [this.total, this.epistemic]) set(path, { visibility: classes ? 'hidden' : 'visible' })
    if (classes) this.showMap(picture, grid)
    else this.showBand(picture, grid, settings.noiseStd)
    this.showDraws(picture, grid, settings, classes)
  }

  /** Nothing is known, so nothing is drawn. */
  clear(): void {
    this.canvas.hidden = true
    for (const path of [this.total, this.epistemic, this.mean]) path.setAttribute('d', '')
    this.draws.replaceChildren()
  }

  private showBand({ mean, variance }: Picture, grid: Grid, noiseStd: number): void {
    const xs = grid.xs.map((x) => this.frame.x(x))
    const edge = (sign: number, extra: number): Float64Array =>
      mean.map((m, i) => this.pixel(m + sign * 2 * Math.sqrt(variance[i] + extra)))
    this.total.setAttribute('d', area(xs, edge(1, noiseStd ** 2), edge(-1, noiseStd ** 2)))
    this.epistemic.setAttribute('d', area(xs, edge(1, 0), edge(-1, 0)))
    this.mean.setAttribute('d', line(xs, mean.map((m) => this.pixel(m))))
  }

  /** Far outside the plane a curve needs no exact place, and a path no huge numbers. */
  private pixel(value: number): number {
    return this.frame.y(Math.min(Math.max(value, -20), 20))
  }

  private showMap({ probs }: Picture, grid: Grid): void {
    this.canvas.width = grid.xs.length
    this.canvas.height = grid.ys.length
    const context = this.canvas.getContext('2d')
    if (context === null) return
    const image = context.createImageData(grid.xs.length, grid.ys.length)
    const [background, colours] = [paper(), classColours()]
    for (let n = 0; n < probs.rows; n++) image.data.set([...blended(probs.row(n), background, colours), 255], 4 * n)
    context.putImageData(image, 0, 0)
    const log = new Matrix(probs.rows, probs.cols, probs.data.map(Math.log))
    this.mean.setAttribute('d', this.pieces(log, grid))
  }

  private showDraws({ draws }: Picture, grid: Grid, settings: Settings, classes: boolean): void {
    const shown = settings.draws ? draws : []
    while (this.draws.childElementCount > shown.length) this.draws.lastElementChild?.remove()
    while (this.draws.childElementCount < shown.length) this.draws.append(svg('path', { class: 'draw' }))
    const xs = grid.xs.map((x) => this.frame.x(x))
    shown.forEach((draw, s) => {
      const path = classes ? this.pieces(draw, grid) : line(xs, draw.data.map((v) => this.pixel(v)))
      this.draws.children[s].setAttribute('d', path)
    })
  }

  private pieces(f: Matrix, grid: Grid): string {
    const { frame } = this
    const at = (x: number, y: number): string => `${frame.x(x).toFixed(1)} ${frame.y(y).toFixed(1)}`
    return boundaries(f, grid)
      .map(([x1, y1, x2, y2]) => `M${at(x1, y1)}L${at(x2, y2)}`)
      .join('')
  }
}

/** Σ p_k colour_k as strong as the class is certain, growing with 1 − H(p) / log C; paper where they are all as likely. */
function blended(p: Float64Array, background: Rgb, colours: readonly Rgb[]): number[] {
  let entropy = 0
  for (const pk of p) if (pk > 0) entropy -= pk * Math.log(pk)
  const strength = 0.85 * (1 - entropy / Math.log(p.length)) ** 0.7
  return background.map((ground, channel) => {
    const mixed = colours.reduce((sum, colour, k) => sum + p[k] * colour[channel], 0)
    return (1 - strength) * ground + strength * mixed
  })
}
