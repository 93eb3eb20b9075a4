/** Boundaries between classes on a grid: where the two largest of the outputs are equal. */

import type { Matrix } from '../core/matrix'

export interface Lattice {
  readonly xs: readonly number[]
  readonly ys: readonly number[]
}

/** Line pieces [x1, y1, x2, y2] of all boundaries of argmax f; row j·|xs| + i of f belongs to (xs[i], ys[j]). */
export function boundaries(f: Matrix, { xs, ys }: Lattice): number[][] {
  const pieces: number[][] = []
  for (let a = 0; a < f.cols; a++) {
    for (let b = a + 1; b < f.cols; b++) {
      const others = Array.from({ length: f.cols }, (_, k) => k).filter((k) => k !== a && k !== b)
      for (let j = 0; j + 1 < ys.length; j++) {
        for (let i = 0; i + 1 < xs.length; i++) {
          if (crossed(f, j * xs.length + i, xs.length, a, b)) pieces.push(...cell(f, { xs, ys }, i, j, a, b, others))
        }
      }
    }
  }
  return pieces
}

/** Does f_a − f_b change its sign in the cell whose first corner is row n? In most cells it does not. */
function crossed(f: Matrix, n: number, nx: number, a: number, b: number): boolean {
  const c = f.cols
  const ahead = (row: number): boolean => f.data[row * c + a] > f.data[row * c + b]
  const first = ahead(n)
  return ahead(n + 1) !== first || ahead(n + nx) !== first || ahead(n + nx + 1) !== first
}

interface Corner {
  readonly x: number
  readonly y: number
  readonly gap: number
  /** f_a − the largest of the other classes: negative where another class wins. */
  readonly lead: number
}

/** Marching squares on f_a − f_b, kept where no third class is larger. */
function cell(f: Matrix, { xs, ys }: Lattice, i: number, j: number, a: number, b: number, others: number[]): number[][] {
  const corner = (di: number, dj: number): Corner => {
    const row = f.row((j + dj) * xs.length + i + di)
    const third = Math.max(-Infinity, ...others.map((k) => row[k]))
    return { x: xs[i + di], y: ys[j + dj], gap: row[a] - row[b], lead: (row[a] + row[b]) / 2 - third }
  }
  const corners = [corner(0, 0), corner(1, 0), corner(1, 1), corner(0, 1)]
  const crossings: [number, number, number][] = []
  corners.forEach((p, k) => {
    const q = corners[(k + 1) % 4]
    if (p.gap > 0 === q.gap > 0) return
    const t = p.gap / (p.gap - q.gap)
    crossings.push([p.x + t * (q.x - p.x), p.y + t * (q.y - p.y), p.lead + t * (q.lead - p.lead)])
  })
  const made: number[][] = []
  for (let k = 0; k + 1 < crossings.length; k += 2) {
    const piece = clipped(crossings[k], crossings[k + 1])
    if (piece !== null) made.push(piece)
  }
  return made
}

/** The part of a piece on which the pair leads. */
function clipped(p: [number, number, number], q: [number, number, number]): number[] | null {
  if (p[2] <= 0 && q[2] <= 0) return null
  if (p[2] >= 0 && q[2] >= 0) return [p[0], p[1], q[0], q[1]]
  const [inside, outside] = p[2] > 0 ? [p, q] : [q, p]
  const t = inside[2] / (inside[2] - outside[2])
  return [inside[0], inside[1], inside[0] + t * (outside[0] - inside[0]), inside[1] + t * (outside[1] - inside[1])]
}
