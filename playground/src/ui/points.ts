/** The data points on the plot: dragged, added, removed, by pointer and by keyboard. */

import { CLASS_NAMES, MOST_POINTS, type Point, round, type Settings } from '../app/settings'
import type { Frame } from './frame'
import { set, svg } from './svg'

export interface PointEvents {
  /** A point was moved, added or removed. */
  changed(): void
  /** Words for the live region. */
  say(words: string): void
}

const HIT = 16 // radius of what a finger can take hold of, in pixels
const STEP = 0.05
const FAR = 0.5
const SHAPES = ['M-6 0A6 6 0 1 0 6 0A6 6 0 1 0 -6 0Z', 'M-5.5 -5.5H5.5V5.5H-5.5Z', 'M0 -7L6.5 5H-6.5Z']

export class PointLayer {
  selected = 0
  private points: Point[] = []

  constructor(
    private readonly group: SVGGElement,
    private readonly surface: SVGElement,
    private readonly frame: Frame,
    private readonly settings: Settings,
    private readonly events: PointEvents,
  ) {
    group.addEventListener('keydown', (event) => this.key(event))
    surface.addEventListener('pointerup', (event) => this.tapped(event))
    surface.addEventListener('pointerdown', (event) => (this.pressed = { x: event.clientX, y: event.clientY }))
  }

  private pressed: { x: number; y: number } | null = null

  /** Draw `points`, which are then changed in place. */
  show(points: Point[]): void {
    this.points = points
    this.selected = Math.max(0, Math.min(this.selected, points.length - 1))
    while (this.group.childElementCount > points.length) this.group.lastElementChild?.remove()
    while (this.group.childElementCount < points.length) this.group.append(this.element())
    points.forEach((_, i) => this.place(i))
  }

  /** Add a point where the plane is (x, y). */
  add(x: number, y: number): void {
    if (this.points.length >= MOST_POINTS) {
      this.events.say(`There are ${MOST_POINTS} points already: remove one first.`)
      return
    }
    this.points.push({ x: round(x), y: round(y), label: this.settings.label })
    this.selected = this.points.length - 1
    this.show(this.points)
    this.events.changed()
    this.events.say(`Added. ${this.describe(this.selected)}.`)
  }

  remove(i: number): void {
    if (this.points.length === 0) return
    const focused = this.group.contains(document.activeElement)
    this.points.splice(i, 1)
    this.show(this.points)
    if (focused) this.focus()
    this.events.changed()
    this.events.say(`Removed. ${this.points.length} points are left.`)
  }

  describe(i: number): string {
    const { x, y, label } = this.points[i]
    const who = this.settings.task === 'classes' ? `, class ${CLASS_NAMES[label]}` : ''
    return `Point ${i + 1} of ${this.points.length}${who}: x ${signed(x)}, y ${signed(y)}`
  }

  private element(): SVGGElement {
    const made = svg('g', { class: 'point', role: 'button', 'aria-roledescription': 'data point' })
    set(made, { 'aria-describedby': 'plot-help' })
    made.append(svg('circle', { r: HIT, class: 'hit' }), svg('circle', { r: 11, class: 'ring' }), svg('path', { class: 'dot' }))
    made.addEventListener('pointerdown', (event) => this.drag(event, made))
    made.addEventListener('dblclick', () => this.remove(this.indexOf(made)))
    made.addEventListener('focus', () => this.select(this.indexOf(made)))
    return made
  }

  private place(i: number): void {
    const { x, y, label } = this.points[i]
    const classes = this.settings.task === 'classes'
    const element = this.group.children[i]
    set(element, {
      transform: `translate(${this.frame.x(x).toFixed(1)} ${this.frame.y(y).toFixed(1)})`,
      'aria-label': this.describe(i),
      tabindex: i === this.selected ? 0 : -1,
      'data-class': classes ? label : 'none',
      'aria-current': String(i === this.selected),
    })
    element.lastElementChild?.setAttribute('d', SHAPES[classes ? label : 0])
  }

  private indexOf(element: Element): number {
    return Array.prototype.indexOf.call(this.group.children, element)
  }

  private select(i: number): void {
    const before = this.selected
    this.selected = i
    if (before < this.points.length) this.place(before)
    this.place(i)
  }

  private focus(): void {
    const element = this.group.children[this.selected]
    if (element instanceof SVGElement) element.focus()
  }

  private drag(event: PointerEvent, element: SVGGElement): void {
    event.stopPropagation()
    element.setPointerCapture(event.pointerId)
    this.select(this.indexOf(element))
    const move = (to: PointerEvent): void => {
      const box = this.surface.getBoundingClientRect()
      this.move(this.frame.inverse(to.clientX - box.left, to.clientY - box.top))
    }
    const stop = (): void => {
      element.removeEventListener('pointermove', move)
      element.removeEventListener('pointerup', stop)
      element.removeEventListener('pointercancel', stop)
    }
    element.addEventListener('pointermove', move)
    element.addEventListener('pointerup', stop)
    element.addEventListener('pointercancel', stop)
  }

  private move(to: { x: number; y: number }): void {
    const point = this.points[this.selected]
    point.x = round(to.x)
    point.y = round(to.y)
    this.place(this.selected)
    this.events.changed()
  }

  /** A click on the background; a swipe that scrolled the page is none. */
  private tapped(event: PointerEvent): void {
    const from = this.pressed
    this.pressed = null
    if (from === null || Math.hypot(event.clientX - from.x, event.clientY - from.y) > 8) return
    if ((event.target as Element).closest('.point') !== null) return
    const box = this.surface.getBoundingClientRect()
    const { x, y } = this.frame.inverse(event.clientX - box.left, event.clientY - box.top)
    this.add(x, y)
  }

  private key(event: KeyboardEvent): void {
    const done = this.action(event)
    if (done === null) return
    event.preventDefault()
    done()
  }

  private action(event: KeyboardEvent): (() => void) | null {
    if (event.ctrlKey || event.metaKey || event.altKey) return null
    const point = this.points[this.selected]
    const step = event.shiftKey ? FAR : STEP
    const by = (dx: number, dy: number) => () => {
      const { x, y } = this.frame.inverse(this.frame.x(point.x + dx * step), this.frame.y(point.y + dy * step))
      this.move({ x, y })
      this.events.say(this.describe(this.selected))
    }
    const to = (offset: number) => () => {
      this.select((this.selected + offset + this.points.length) % this.points.length)
      this.focus()
    }
    switch (event.key) {
      case 'ArrowLeft':
        return by(-1, 0)
      case 'ArrowRight':
        return by(1, 0)
      case 'ArrowUp':
        return by(0, 1)
      case 'ArrowDown':
        return by(0, -1)
      case 'PageDown':
        return to(1)
      case 'PageUp':
        return to(-1)
      case 'a':
      case 'A':
        return () => {
          this.add(point.x + 0.3 > 4 ? point.x - 0.3 : point.x + 0.3, point.y)
          this.focus()
        }
      case 'Delete':
      case 'Backspace':
        return () => this.remove(this.selected)
      default:
        return null
    }
  }
}

export function signed(value: number): string {
  return value.toFixed(2).replace('-', '−')
}
