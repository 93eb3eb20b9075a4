/** The points as numbers: the picture for those who would rather type than drag. */

import { CLASS_NAMES, type Point, round, type Settings, VIEW } from '../app/settings'
import { byId } from './svg'

export class PointTable {
  private readonly body = byId<HTMLTableSectionElement>('points')
  private readonly head = byId<HTMLTableRowElement>('points-head')

  constructor(
    private readonly settings: Settings,
    private readonly changed: () => void,
    private readonly remove: (i: number) => void,
  ) {}

  show(points: Point[]): void {
    const classes = this.settings.task === 'classes'
    this.head.replaceChildren(...['Point', 'x', 'y', ...(classes ? ['Class'] : []), 'Remove'].map(header))
    const sameCount = this.body.childElementCount === points.length
    while (this.body.childElementCount > points.length) this.body.lastElementChild?.remove()
    // A cell that is being typed into is left alone.
    const typing = document.activeElement?.matches('input') ? document.activeElement.closest('tr') : null
    points.forEach((point, i) => {
      const row = this.body.children[i]
      if (row !== undefined && row === typing && sameCount) return
      const fresh = this.row(point, i, classes)
      if (row === undefined) this.body.append(fresh)
      else row.replaceWith(fresh)
    })
  }

  private row(point: Point, i: number, classes: boolean): HTMLTableRowElement {
    const made = document.createElement('tr')
    const name = document.createElement('th')
    name.scope = 'row'
    name.textContent = String(i + 1)
    made.append(name, cell(this.number(point, 'x', i)), cell(this.number(point, 'y', i)))
    if (classes) made.append(cell(this.choice(point, i)))
    const button = document.createElement('button')
    button.type = 'button'
    button.textContent = 'Remove'
    button.setAttribute('aria-label', `Remove point ${i + 1}`)
    button.addEventListener('click', () => this.remove(i))
    made.append(cell(button))
    return made
  }

  private number(point: Point, axis: 'x' | 'y', i: number): HTMLInputElement {
    const made = document.createElement('input')
    Object.assign(made, { type: 'number', step: '0.1', min: String(-VIEW[axis]), max: String(VIEW[axis]) })
    made.value = String(point[axis])
    made.setAttribute('aria-label', `${axis} of point ${i + 1}`)
    made.addEventListener('input', () => {
      if (made.value === '' || made.validity.rangeOverflow || made.validity.rangeUnderflow) return
      point[axis] = round(made.valueAsNumber)
      this.changed()
    })
    return made
  }

  private choice(point: Point, i: number): HTMLSelectElement {
    const made = document.createElement('select')
    made.setAttribute('aria-label', `Class of point ${i + 1}`)
    CLASS_NAMES.forEach((name, k) => made.add(new Option(name, String(k), false, k === point.label)))
    made.addEventListener('change', () => {
      point.label = Number(made.value)
      this.changed()
    })
    return made
  }
}

function header(words: string): HTMLTableCellElement {
  const made = document.createElement('th')
  made.scope = 'col'
  made.textContent = words
  return made
}

function cell(content: HTMLElement): HTMLTableCellElement {
  const made = document.createElement('td')
  made.append(content)
  return made
}
