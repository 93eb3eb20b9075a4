/** Light or dark: the reader's system decides, or the site that the page is shown in. Colours as the style sheet has them. */

export type Rgb = readonly [number, number, number]

export function paper(): Rgb {
  return colour('--plot')
}

export function classColours(): readonly Rgb[] {
  return ['--class-a', '--class-b', '--class-c'].map(colour)
}

/** A custom property as numbers; the browser resolves light-dark() on a real element. */
function colour(name: string): Rgb {
  const probe = document.createElement('i')
  probe.style.color = `var(${name})`
  document.body.append(probe)
  const channels = getComputedStyle(probe).color.match(/[\d.]+/g) ?? []
  probe.remove()
  const [r, g, b] = channels.map(Number)
  return [r, g, b]
}

/** Calls back when the theme changes, after following it. */
export function followTheme(changed: () => void): void {
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', changed)
  if (window.parent !== window) document.documentElement.dataset.framed = ''
  const frame = frameAround()
  if (frame === null) return
  fitHeight(frame)
  const site = frame.ownerDocument.body
  const follow = (): void => {
    const scheme = site.getAttribute('data-md-color-scheme')
    if (scheme !== null) document.documentElement.dataset.theme = scheme === 'slate' ? 'dark' : 'light'
    changed()
  }
  new MutationObserver(follow).observe(site, { attributeFilter: ['data-md-color-scheme'] })
  follow()
}

/** The frame that a page of the documentation shows this one in, where the browser lets us see it. */
function frameAround(): HTMLElement | null {
  try {
    return window.frameElement as HTMLElement | null
  } catch {
    return null // opened from a file, where every page is an origin of its own: the system's theme it is
  }
}

/** The frame is as high as the page, so only one of them scrolls. */
function fitHeight(frame: HTMLElement): void {
  const fit = (): void => {
    frame.style.height = `${document.body.offsetHeight + 4}px`
  }
  new ResizeObserver(fit).observe(document.body)
}
