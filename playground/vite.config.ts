/** One file in, one file out: the page with its script and style inside, and a policy that forbids every request. */

import { createHash } from 'node:crypto'
import { readdirSync, readFileSync } from 'node:fs'
import { join, relative, sep } from 'node:path'
import type { Plugin } from 'vite'
import { defineConfig } from 'vitest/config'

const ROOT = import.meta.dirname
const OUTPUT = 'page.html'

export default defineConfig({
  root: ROOT,
  base: './',
  build: {
    outDir: process.env.PLAYGROUND_OUT ?? join(ROOT, '..', 'docs', 'playground'),
    emptyOutDir: false,
    target: 'es2022',
    modulePreload: { polyfill: false },
    assetsInlineLimit: Number.MAX_SAFE_INTEGER,
    cssCodeSplit: false,
  },
  plugins: [oneFile()],
  test: { include: ['tests/**/*.test.ts'] },
})

/** Put script and style into the page, and drop their files. */
function oneFile(): Plugin {
  return {
    name: 'one-file',
    enforce: 'post',
    generateBundle(_, bundle) {
      let [script, style, page] = ['', '', '']
      for (const [name, file] of Object.entries(bundle)) {
        if (file.type === 'chunk') script += file.code
        else if (name.endsWith('.css')) style += String(file.source)
        else if (name.endsWith('.html')) page = String(file.source)
        delete bundle[name]
      }
      this.emitFile({ type: 'asset', fileName: OUTPUT, source: assembled(page, script.trim(), style.trim()) })
    },
  }
}

function assembled(page: string, script: string, style: string): string {
  const policy = [
    "default-src 'none'",
    `script-src '${sha256(script)}'`,
    "style-src 'unsafe-inline'", // the script sets a height and asks for a colour
    'img-src data:',
    "base-uri 'none'",
    "form-action 'none'",
  ].join('; ')
  const head = [
    `<meta http-equiv="Content-Security-Policy" content="${policy}" />`,
    `<meta name="sources" content="${sourcesDigest()}" />`,
    `<style>${style}</style>`,
  ]
  const bare = page.replace(/\s*<script[^>]*src=[^>]*><\/script>/g, '').replace(/\s*<link[^>]*stylesheet[^>]*>/g, '')
  // Functions, since “$&” means something in a replacement string.
  return bare
    .replace('<meta charset="utf-8" />', (found) => [found, ...head].join('\n    '))
    .replace('</body>', () => `<script type="module">${script}</script>\n  </body>`)
}

function sha256(text: string): string {
  return `sha256-${createHash('sha256').update(text).digest('base64')}`
}

/** What the page was built from: tests/playground/test_recorded_cases.py computes the same, so a stale page is found without node. */
function sourcesDigest(): string {
  const files = ['index.html', 'package-lock.json', 'tsconfig.json', 'vite.config.ts', ...below(join(ROOT, 'src'))].sort()
  const hash = createHash('sha256')
  for (const name of files) {
    hash.update(`${name}\n`)
    hash.update(readFileSync(join(ROOT, name), 'utf-8').replaceAll('\r\n', '\n'))
  }
  return hash.digest('hex')
}

function below(folder: string): string[] {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    const path = join(folder, entry.name)
    return entry.isDirectory() ? below(path) : [relative(ROOT, path).split(sep).join('/')]
  })
}
