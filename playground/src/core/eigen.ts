/**
 * Eigenvalues and eigenvectors of a symmetric matrix: Householder reflections to a tridiagonal matrix, then the
 * implicit QL iteration (Wilkinson and Reinsch, 1971; Golub and Van Loan, section 8.3). O(P³), once for each fit.
 */

import { dot, Matrix } from './matrix'

export interface Eigen {
  /** Ascending. */
  readonly values: Float64Array
  /** Row i is the eigenvector of value i. */
  readonly vectors: Matrix
}

const MOST_SWEEPS = 60

export function eigenSymmetric(a: Matrix): Eigen {
  const n = a.rows
  if (n === 0) return { values: new Float64Array(0), vectors: new Matrix(0, 0) }
  const work = new Matrix(n, n, a.data.slice())
  const { diagonal, below, reflections } = tridiagonalise(work)
  const vectors = accumulate(work, reflections)
  iterateQL(diagonal, below, vectors)
  return ascending(diagonal, vectors)
}

interface Tridiagonal {
  readonly diagonal: Float64Array
  /** below[i] couples i and i + 1. */
  readonly below: Float64Array
  /** 2 / |v|² of each reflection; v itself stays in the rows of the work matrix. */
  readonly reflections: Float64Array
}

/** A → Qᵀ A Q, one reflection I − β v vᵀ for each row from the last to the second; v is left in that row of A. */
function tridiagonalise(a: Matrix): Tridiagonal {
  const n = a.rows
  const diagonal = new Float64Array(n)
  const below = new Float64Array(n)
  const reflections = new Float64Array(n)
  const product = new Float64Array(n)
  for (let k = n - 1; k > 0; k--) {
    diagonal[k] = a.data[k * n + k]
    const v = a.row(k).subarray(0, k)
    const beta = householder(v)
    below[k - 1] = beta.target
    reflections[k] = beta.scale
    if (beta.scale !== 0) reflectBothSides(a, v, beta.scale, product.subarray(0, k))
  }
  diagonal[0] = a.data[0]
  return { diagonal, below, reflections }
}

/** The reflection that takes v to (0, …, 0, target); v becomes its direction. */
function householder(v: Float64Array): { target: number; scale: number } {
  const last = v.length - 1
  let largest = 0
  for (const x of v) largest = Math.max(largest, Math.abs(x))
  let rest = 0
  for (let i = 0; i < last; i++) rest = Math.max(rest, Math.abs(v[i]))
  if (rest === 0) return { target: v[last], scale: 0 }
  // Scaled first, so that squares of very small entries do not underflow.
  let sum = 0
  for (const x of v) sum += (x / largest) * (x / largest)
  const target = (v[last] > 0 ? -1 : 1) * largest * Math.sqrt(sum)
  v[last] -= target
  for (let i = 0; i <= last; i++) v[i] /= largest
  return { target, scale: 2 / dot(v, v) }
}

/** The leading block A → (I − β v vᵀ) A (I − β v vᵀ) = A − v wᵀ − w vᵀ, with p = β A v and w = p − ½ β (vᵀp) v. */
function reflectBothSides(a: Matrix, v: Float64Array, beta: number, w: Float64Array): void {
  const k = v.length
  for (let i = 0; i < k; i++) w[i] = beta * dot(a.row(i).subarray(0, k), v)
  const half = 0.5 * beta * dot(w, v)
  for (let i = 0; i < k; i++) w[i] -= half * v[i]
  for (let i = 0; i < k; i++) {
    const row = a.row(i)
    for (let j = 0; j < k; j++) row[j] -= v[i] * w[j] + w[i] * v[j]
  }
}

/** Row i of the result is column i of Q: what the QL iteration turns into eigenvectors. */
function accumulate(work: Matrix, reflections: Float64Array): Matrix {
  const n = work.rows
  const Qt = new Matrix(n, n)
  for (let i = 0; i < n; i++) Qt.data[i * n + i] = 1
  // A = H_{n−1} … H_1 T H_1 … H_{n−1}: Q = H_{n−1} … H_1, so Qᵀ = H_1 … H_{n−1} I.
  for (let i = 0; i < n; i++) {
    const row = Qt.row(i)
    for (let k = 1; k < n; k++) {
      if (reflections[k] === 0) continue
      const v = work.row(k).subarray(0, k)
      const head = row.subarray(0, k)
      const scale = reflections[k] * dot(v, head)
      if (scale !== 0) for (let j = 0; j < k; j++) head[j] -= scale * v[j]
    }
  }
  return Qt
}

/** Implicit QL with Wilkinson's shift on (d, e); every rotation is applied to two rows of `vectors`. */
function iterateQL(d: Float64Array, e: Float64Array, vectors: Matrix): void {
  const n = d.length
  for (let first = 0; first < n; first++) {
    for (let sweep = 0; ; sweep++) {
      const last = endOfBlock(d, e, first)
      if (last === first) break
      if (sweep === MOST_SWEEPS) throw new Error('The eigenvalue iteration did not converge: is an entry not finite?')
      sweepQL(d, e, first, last, vectors)
    }
  }
}

function endOfBlock(d: Float64Array, e: Float64Array, first: number): number {
  let last = first
  while (last < d.length - 1) {
    const scale = Math.abs(d[last]) + Math.abs(d[last + 1])
    if (Math.abs(e[last]) <= Number.EPSILON * scale) break
    last++
  }
  return last
}

function sweepQL(d: Float64Array, e: Float64Array, first: number, last: number, vectors: Matrix): void {
  let g = (d[first + 1] - d[first]) / (2 * e[first])
  g = d[last] - d[first] + e[first] / (g + (g >= 0 ? 1 : -1) * Math.hypot(g, 1))
  let sine = 1
  let cosine = 1
  let shift = 0
  for (let i = last - 1; i >= first; i--) {
    const f = sine * e[i]
    const b = cosine * e[i]
    const r = Math.hypot(f, g)
    e[i + 1] = r
    if (r === 0) {
      d[i + 1] -= shift
      e[last] = 0
      return
    }
    sine = f / r
    cosine = g / r
    g = d[i + 1] - shift
    const t = (d[i] - g) * sine + 2 * cosine * b
    shift = sine * t
    d[i + 1] = g + shift
    g = cosine * t - b
    rotateRows(vectors.row(i), vectors.row(i + 1), cosine, sine)
  }
  d[first] -= shift
  e[first] = g
  e[last] = 0
}

function rotateRows(upper: Float64Array, lower: Float64Array, cosine: number, sine: number): void {
  for (let k = 0; k < upper.length; k++) {
    const held = lower[k]
    lower[k] = sine * upper[k] + cosine * held
    upper[k] = cosine * upper[k] - sine * held
  }
}

function ascending(values: Float64Array, vectors: Matrix): Eigen {
  const order = Array.from(values.keys()).sort((i, j) => values[i] - values[j])
  const sorted = new Matrix(vectors.rows, vectors.cols)
  order.forEach((from, to) => sorted.row(to).set(vectors.row(from)))
  return { values: Float64Array.from(order, (i) => values[i]), vectors: sorted }
}
