/** The controls beside the picture: from the page into the settings, and back. */

import type { Structure } from '../core/curvature'
import type { Link } from '../core/links'
import { type Predictive, SCENARIOS, type Scenario, type Settings, type Task } from '../app/settings'
import { short } from './curve'
import { byId } from './svg'
import { legend, LINK_TEXT, STRUCTURE_TEXT } from './texts'

export interface ControlEvents {
  /** Something that is drawn differs. */
  moved(): void
  /** Another task: other points, another network. */
  taskChanged(): void
}

export class Controls {
  private readonly automatic = byId<HTMLInputElement>('automatic')
  private readonly precision = byId<HTMLInputElement>('precision')
  private readonly noise = byId<HTMLInputElement>('noise')
  private readonly link = byId<HTMLSelectElement>('link')
  private readonly draws = byId<HTMLInputElement>('draws')

  constructor(
    private readonly settings: Settings,
    private readonly events: ControlEvents,
  ) {
    this.listen()
    byId('tries').replaceChildren(...SCENARIOS.map((scenario) => this.scenario(scenario)))
  }

  /** The page says what the settings are. */
  show(): void {
    const { settings } = this
    const { task, precision, noiseStd } = settings
    document.documentElement.dataset.task = task
    for (const name of ['task', 'predictive', 'structure', 'label'] as const) check(name, String(settings[name]))
    this.automatic.checked = settings.automatic
    this.draws.checked = settings.draws
    this.link.value = settings.link
    this.link.disabled = settings.predictive === 'sampled'
    slide(this.precision, precision, byId('precision-value'))
    slide(this.noise, noiseStd, byId('noise-value'))
    byId('structure-text').textContent = STRUCTURE_TEXT[settings.structure]
    byId('link-text').textContent = this.link.disabled
      ? 'Not needed for sampled weights: their softmax values are averaged as they are.'
      : LINK_TEXT[settings.link]
    byId('legend').replaceChildren(...legend(settings).map(legendItem))
  }

  /** Take one of the situations worth trying. */
  try(scenario: Scenario): void {
    const before = this.settings.task
    Object.assign(this.settings, scenario.settings)
    if (this.settings.task !== before) this.events.taskChanged()
    this.events.moved()
    for (const item of byId('tries').children) {
      item.classList.toggle('chosen', (item as HTMLElement).dataset.id === scenario.id)
    }
  }

  private listen(): void {
    const { settings, events } = this
    radios('task', (value) => {
      settings.task = value as Task
      events.taskChanged()
    })
    radios('predictive', (value) => (settings.predictive = value as Predictive), events.moved)
    radios('structure', (value) => (settings.structure = value as Structure), events.moved)
    radios('label', (value) => (settings.label = Number(value)))
    this.on(this.link, 'change', () => (settings.link = this.link.value as Link))
    this.on(this.draws, 'change', () => (settings.draws = this.draws.checked))
    this.on(this.automatic, 'change', () => (settings.automatic = this.automatic.checked))
    // Who moves a slider wants to choose.
    this.on(this.precision, 'input', () => {
      Object.assign(settings, { precision: 10 ** this.precision.valueAsNumber, automatic: false })
    })
    this.on(this.noise, 'input', () => {
      Object.assign(settings, { noiseStd: 10 ** this.noise.valueAsNumber, automatic: false })
    })
  }

  private on(element: HTMLElement, event: string, take: () => void): void {
    element.addEventListener(event, () => {
      take()
      this.events.moved()
    })
  }

  private scenario(scenario: Scenario): HTMLLIElement {
    const item = document.createElement('li')
    item.dataset.id = scenario.id
    const button = document.createElement('button')
    button.type = 'button'
    button.textContent = scenario.title
    const words = document.createElement('p')
    words.textContent = scenario.text
    words.id = `try-${scenario.id}`
    button.setAttribute('aria-describedby', words.id)
    button.addEventListener('click', () => {
      this.try(scenario)
      byId('plot').scrollIntoView({ block: 'nearest' })
    })
    item.append(button, words)
    return item
  }
}

function radios(name: string, take: (value: string) => void, then: () => void = () => {}): void {
  for (const input of inputs(name)) {
    input.addEventListener('change', () => {
      take(input.value)
      then()
    })
  }
}

function check(name: string, value: string): void {
  for (const input of inputs(name)) input.checked = input.value === value
}

function inputs(name: string): NodeListOf<HTMLInputElement> {
  return document.querySelectorAll<HTMLInputElement>(`input[name="${name}"]`)
}

/** Sliders are logarithmic; what is read out is the value. */
function slide(input: HTMLInputElement, value: number, output: HTMLElement): void {
  if (document.activeElement !== input || Math.abs(input.valueAsNumber - Math.log10(value)) > 0.02) {
    input.value = String(Math.log10(value))
  }
  input.setAttribute('aria-valuetext', short(value))
  output.textContent = short(value)
}

function legendItem({ kind, words }: { kind: string; words: string }): HTMLLIElement {
  const item = document.createElement('li')
  const mark = document.createElement('i')
  mark.className = `sample ${kind}`
  item.append(mark, words)
  return item
}
