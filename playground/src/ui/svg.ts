/** Small helpers to make and change SVG elements. */

export type Attributes = Readonly<Record<string, string | number>>

export function svg<K extends keyof SVGElementTagNameMap>(name: K, attributes: Attributes = {}): SVGElementTagNameMap[K] {
  const made = document.createElementNS('http://www.w3.org/2000/svg', name)
  set(made, attributes)
  return made
}

export function set(element: Element, attributes: Attributes): void {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value))
}

/** “M x y L x y …” through the points. */
export function line(xs: ArrayLike<number>, ys: ArrayLike<number>): string {
  let path = ''
  for (let i = 0; i < xs.length; i++) path += `${i === 0 ? 'M' : 'L'}${xs[i].toFixed(1)} ${ys[i].toFixed(1)}`
  return path
}

/** The area between two curves over the same places. */
export function area(xs: ArrayLike<number>, upper: ArrayLike<number>, lower: ArrayLike<number>): string {
  const back = Array.from(xs, (_, i) => xs.length - 1 - i)
  return `${line(xs, upper)}${line(back.map((i) => xs[i]), back.map((i) => lower[i])).replace('M', 'L')}Z`
}

export function byId<T extends Element = HTMLElement>(id: string): T {
  const found = document.getElementById(id)
  if (found === null) throw new Error(`The page has no element “${id}”.`)
  return found as unknown as T
}
