/** The page: settings, loop, picture and controls, put together. */

import { Loop, type View } from './app/loop'
import { SCENARIOS, startSettings } from './app/settings'
import type { Numbers } from './app/picture'
import { compare } from './core/compare'
import { Controls } from './ui/controls'
import { CurveChart } from './ui/curve'
import { Frame } from './ui/frame'
import { PointLayer } from './ui/points'
import { type Grid, gridFor, Scene } from './ui/scene'
import { byId, set, svg } from './ui/svg'
import { PointTable } from './ui/table'
import { bandInWords, described, mapInWords } from './ui/texts'
import { followTheme } from './ui/theme'
import './style.css'

const settings = startSettings()
const status = byId('status')
const surface = byId<SVGSVGElement>('scene')
const [axes, under, over] = [svg('g'), svg('g'), svg('g')]
set(axes, { 'aria-hidden': 'true' })
set(under, { 'aria-hidden': 'true' })
set(over, { role: 'application', 'aria-label': 'Data points', 'aria-describedby': 'plot-help' })
surface.append(axes, under, over)

const frame = new Frame(axes)
const scene = new Scene(under, byId<HTMLCanvasElement>('map'), frame)
const charts = {
  precision: new CurveChart(byId<SVGSVGElement>('curve-precision'), byId('curve-precision-text'), 'prior precision'),
  noise: new CurveChart(byId<SVGSVGElement>('curve-noise'), byId('curve-noise-text'), 'noise'),
}
const still = window.matchMedia('(prefers-reduced-motion: reduce)').matches
const loop = new Loop<Grid>(settings, { grid: gridFor, show, empty }, still)
const layer = new PointLayer(over, surface, frame, settings, { changed: pointsChanged, say })
const table = new PointTable(settings, typed, removeFromTable)
const controls = new Controls(settings, { moved, taskChanged })

function show(view: View<Grid>): void {
  scene.show(view.picture, view.grid, settings)
  controls.show()
  if (view.numbers !== null) showNumbers(view, view.numbers)
}

function showNumbers({ picture, grid }: View<Grid>, numbers: Numbers): void {
  const regression = settings.task === 'regression'
  const { evidence, scores } = numbers
  charts.precision.show(numbers.overPrecision, settings.precision, evidence.total)
  if (numbers.overNoise !== null) charts.noise.show(numbers.overNoise, settings.noiseStd, evidence.total)
  write('score-network', scores.network)
  write('score-linearised', scores.linearised)
  write('score-sampled', scores.sampled)
  write('part-fit', evidence.logLik)
  write('part-det', -0.5 * evidence.logDetRatio)
  write('part-scatter', -0.5 * evidence.scatter)
  write('part-total', evidence.total)
  byId('effective').textContent = `${numbers.effective.toFixed(1)} of ${numbers.nWeights}`
  const uncertainty = regression ? bandInWords(grid.xs, picture.mean, picture.variance) : mapInWords(picture.probs)
  const words = described(settings, numbers, uncertainty)
  byId('scene-text').textContent = words
  sayLater(words)
}

function empty(): void {
  scene.clear()
  controls.show()
  say('There are no points. Click or tap the picture to add one, or reset the data.')
}

function write(id: string, value: number): void {
  byId(id).textContent = value.toFixed(2).replace('-', '−')
}

let later = 0

/** At once; what the picture says follows when nothing has changed for a while. */
function say(words: string): void {
  clearTimeout(later)
  status.textContent = words
}

function sayLater(words: string): void {
  clearTimeout(later)
  later = window.setTimeout(() => (status.textContent = words), 700)
}

function moved(): void {
  controls.show()
  loop.ask()
}

function pointsChanged(): void {
  loop.pointsChanged()
  table.show(loop.learner.points)
}

function typed(): void {
  layer.show(loop.learner.points)
  pointsChanged()
}

function removeFromTable(i: number): void {
  layer.remove(i)
  const rows = document.querySelectorAll<HTMLButtonElement>('#points button')
  rows[Math.min(i, rows.length - 1)]?.focus()
}

function showPoints(): void {
  layer.show(loop.learner.points)
  table.show(loop.learner.points)
}

function taskChanged(): void {
  resize()
  layer.selected = 0
  showPoints()
  moved()
}

function resize(): void {
  const plot = byId('plot')
  const width = Math.floor(plot.clientWidth)
  if (width === 0) return
  frame.resize(width, settings.task === 'regression' ? 'input x' : 'first input', settings.task === 'regression' ? 'target y' : 'second input')
  plot.style.height = `${frame.height}px`
  set(surface, { viewBox: `0 0 ${width} ${frame.height}`, width, height: frame.height })
}

function buttons(): void {
  byId('remove').addEventListener('click', () => layer.remove(layer.selected))
  byId('add').addEventListener('click', () => layer.add(0, 0))
  byId('retrain').addEventListener('click', () => loop.retrain())
  byId('redraw').addEventListener('click', () => loop.newDraws())
  byId('reset').addEventListener('click', () => {
    loop.resetPoints()
    showPoints()
  })
}

/** page.html#linearise starts in that situation. */
function fromAddress(): void {
  const asked = SCENARIOS.find(({ id }) => `#${id}` === window.location.hash)
  if (asked !== undefined) controls.try(asked)
}

buttons()
taskChanged()
fromAddress()
window.addEventListener('hashchange', fromAddress)
followTheme(() => loop.ask())
new ResizeObserver(() => {
  resize()
  showPoints()
  loop.ask()
}).observe(byId('plot'))

// For the browser test: the numbers of the page that is shipped, against Lapwing's.
declare global {
  interface Window {
    playground: { compare: typeof compare; settings: typeof settings }
  }
}
window.playground = { compare, settings }
