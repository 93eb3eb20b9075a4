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
  const site = siteAround()
  if (site === null) return
  const follow = (): void => {
    const scheme = site.getAttribute('data-md-color-scheme')
    if (scheme !== null) document.documentElement.dataset.theme = scheme === 'slate' ? 'dark' : 'light'
    changed()
  }
  new MutationObserver(follow).observe(site, { attributeFilter: ['data-md-color-scheme'] })
  follow()
}

/** The body of the documentation page that frames this one, where the browser lets us see it. */
function siteAround(): HTMLElement | null {
  if (window.parent === window) return null
  document.documentElement.dataset.framed = ''
  try {
    return window.parent.document.body
  } catch {
    return null // opened from a file, where every page is an origin of its own: the system's theme it is
  }
}
