/** A small chart: the log evidence over one hyperparameter, with where it is now and where it is highest. */

import type { Curve } from '../app/picture'
import { line, set, svg } from './svg'

const [WIDTH, HEIGHT] = [300, 150]
const PAD = { left: 20, right: 20, top: 14, bottom: 34 }
const DEPTH = 40 // nats below the top that are shown

export class CurveChart {
  private readonly path = svg('path', { class: 'curve' })
  private readonly now = svg('line', { class: 'now', y1: PAD.top, y2: HEIGHT - PAD.bottom })
  private readonly here = svg('circle', { class: 'here', r: 5 })
  private readonly top = svg('path', { class: 'top' })
  private readonly ticks = svg('g')

  constructor(
    element: SVGElement,
    private readonly caption: HTMLElement,
    private readonly name: string,
  ) {
    set(element, { viewBox: `0 0 ${WIDTH} ${HEIGHT}` })
    element.append(this.ticks, this.path, this.now, this.top, this.here)
  }

  show({ at, logEvidence }: Curve, value: number, height: number): void {
    const most = Math.max(...logEvidence)
    const least = Math.max(Math.min(...logEvidence), most - DEPTH)
    const span = Math.max(most - least, 1)
    const x = (v: number): number =>
      PAD.left + ((WIDTH - PAD.left - PAD.right) * Math.log(v / at[0])) / Math.log(at[at.length - 1] / at[0])
    const y = (e: number): number => PAD.top + ((HEIGHT - PAD.top - PAD.bottom) * (most - Math.max(e, least))) / span
    const best = logEvidence.indexOf(most)
    this.path.setAttribute('d', line(at.map(x), logEvidence.map(y)))
    set(this.now, { x1: x(value), x2: x(value) })
    set(this.here, { cx: x(value), cy: y(height) })
    set(this.top, { d: `M${x(at[best]) - 5} ${PAD.top - 9}h10l-5 7z` })
    this.axis(at, x)
    const words =
      `Log evidence over the ${this.name}. Now ${short(value)}: ${height.toFixed(1)}. ` +
      `Highest (▼) near ${short(at[best])}: ${most.toFixed(1)}.`
    this.caption.textContent = words.replaceAll('-', '−')
  }

  private axis(at: readonly number[], x: (v: number) => number): void {
    const base = HEIGHT - PAD.bottom
    const marks: SVGElement[] = [svg('line', { class: 'axis zero', x1: PAD.left, x2: WIDTH - PAD.right, y1: base, y2: base })]
    for (const v of roundValues(at[0], at[at.length - 1])) {
      const label = svg('text', { x: x(v), y: base + 15, 'text-anchor': 'middle', class: 'tick' })
      label.textContent = String(v)
      marks.push(svg('line', { class: 'axis', x1: x(v), x2: x(v), y1: PAD.top, y2: base }), label)
    }
    const name = svg('text', { x: WIDTH / 2, y: HEIGHT - 4, 'text-anchor': 'middle', class: 'axis-name' })
    name.textContent = this.name
    this.ticks.replaceChildren(...marks, name)
  }
}

/** Powers of ten, or 1-2-5 steps on a short range. */
function roundValues(least: number, most: number): number[] {
  const steps = most / least > 1e4 ? [1] : [1, 2, 5]
  const made: number[] = []
  for (let power = -4; power <= 4; power++) {
    for (const step of steps) {
      const v = Number((step * 10 ** power).toPrecision(1))
      if (v >= least * 0.999 && v <= most * 1.001) made.push(v)
    }
  }
  return made
}

export function short(value: number): string {
  return String(Number(value.toPrecision(2)))
}
