/** The plane on the screen: one scale for both axes, its grid lines and its labels. */

import { VIEW } from '../app/settings'
import { set, svg } from './svg'

export class Frame {
  width = 0

  constructor(private readonly axes: SVGGElement) {}

  get height(): number {
    return Math.round((this.width * VIEW.y) / VIEW.x)
  }

  get unit(): number {
    return this.width / (2 * VIEW.x)
  }

  x(value: number): number {
    return (value + VIEW.x) * this.unit
  }

  y(value: number): number {
    return (VIEW.y - value) * this.unit
  }

  /** Pixels of the plot → the plane, kept inside it. */
  inverse(px: number, py: number): { x: number; y: number } {
    const clamp = (v: number, most: number): number => Math.min(Math.max(v, -most), most)
    return { x: clamp(px / this.unit - VIEW.x, VIEW.x), y: clamp(VIEW.y - py / this.unit, VIEW.y) }
  }

  resize(width: number, xName: string, yName: string): void {
    this.width = width
    const lines: SVGElement[] = []
    for (let v = -Math.floor(VIEW.x); v <= VIEW.x; v++) lines.push(...this.gridLine('x', v))
    for (let v = -Math.floor(VIEW.y); v <= VIEW.y; v++) lines.push(...this.gridLine('y', v))
    lines.push(this.text(xName, { x: this.width - 8, y: this.y(0) - 6, 'text-anchor': 'end', class: 'axis-name' }))
    lines.push(this.text(yName, { x: this.x(0) + 6, y: 15, class: 'axis-name' }))
    this.axes.replaceChildren(...lines)
  }

  private gridLine(axis: 'x' | 'y', v: number): SVGElement[] {
    const across = axis === 'x'
    const at = across ? this.x(v) : this.y(v)
    const made = svg('line', across ? { x1: at, x2: at, y1: 0, y2: this.height } : { x1: 0, x2: this.width, y1: at, y2: at })
    set(made, { class: v === 0 ? 'axis zero' : 'axis' })
    if (v === 0 || Math.abs(v) === VIEW.x || this.width < 480) return [made]
    const label = String(v).replace('-', '−')
    const place = across
      ? { x: at, y: this.height - 5, 'text-anchor': 'middle' }
      : { x: 5, y: at + 4, 'text-anchor': 'start' }
    return [made, this.text(label, { ...place, class: 'tick' })]
  }

  private text(words: string, attributes: Record<string, string | number>): SVGElement {
    const made = svg('text', attributes)
    made.textContent = words
    return made
  }
}
