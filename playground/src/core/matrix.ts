/** Dense row-major matrices in double precision: the few operations the posterior needs. */

export class Matrix {
  readonly data: Float64Array

  constructor(
    readonly rows: number,
    readonly cols: number,
    data?: Float64Array,
  ) {
    this.data = data ?? new Float64Array(rows * cols)
    if (this.data.length !== rows * cols) {
      throw new RangeError(`A ${rows} × ${cols} matrix has ${rows * cols} entries, but ${this.data.length} came.`)
    }
  }

  static of(rows: readonly (readonly number[])[]): Matrix {
    const cols = rows[0]?.length ?? 0
    const made = new Matrix(rows.length, cols)
    rows.forEach((row, i) => made.data.set(row, i * cols))
    return made
  }

  /** Row i, a view: writing to it writes to the matrix. */
  row(i: number): Float64Array {
    return this.data.subarray(i * this.cols, (i + 1) * this.cols)
  }

  /** The columns from `start` on, copied. */
  columnsFrom(start: number): Matrix {
    if (start === 0) return this
    const made = new Matrix(this.rows, this.cols - start)
    for (let i = 0; i < this.rows; i++) made.row(i).set(this.row(i).subarray(start))
    return made
  }
}

export function dot(a: Float64Array, b: Float64Array): number {
  let total = 0
  for (let i = 0; i < a.length; i++) total += a[i] * b[i]
  return total
}

/** A Bᵀ, both read along their rows. Four rows of B at once, since one sum waits for its own last addition. */
export function timesTransposed(a: Matrix, b: Matrix): Matrix {
  const made = new Matrix(a.rows, b.rows)
  const n = a.cols
  const B = b.data
  for (let i = 0; i < a.rows; i++) {
    const row = a.row(i)
    const to = made.row(i)
    let j = 0
    for (; j + 4 <= b.rows; j += 4) {
      let [s0, s1, s2, s3] = [0, 0, 0, 0]
      let at = j * n
      for (let k = 0; k < n; k++, at++) {
        const x = row[k]
        s0 += x * B[at]
        s1 += x * B[at + n]
        s2 += x * B[at + 2 * n]
        s3 += x * B[at + 3 * n]
      }
      to[j] = s0
      to[j + 1] = s1
      to[j + 2] = s2
      to[j + 3] = s3
    }
    for (; j < b.rows; j++) to[j] = dot(row, b.row(j))
  }
  return made
}

/** AᵀA: symmetric, computed once for each pair. */
export function gram(a: Matrix): Matrix {
  const p = a.cols
  const made = new Matrix(p, p)
  for (let n = 0; n < a.rows; n++) {
    const row = a.row(n)
    for (let i = 0; i < p; i++) {
      const scale = row[i]
      if (scale === 0) continue
      const target = made.row(i)
      for (let j = i; j < p; j++) target[j] += scale * row[j]
    }
  }
  for (let i = 0; i < p; i++) for (let j = 0; j < i; j++) made.data[i * p + j] = made.data[j * p + i]
  return made
}

/** Lower triangular L with L Lᵀ = A, or the leading part of it where A is singular: a pivot of zero gives a column of zeros. */
export function cholesky(a: Matrix): Matrix {
  const n = a.rows
  const L = new Matrix(n, n)
  for (let j = 0; j < n; j++) {
    const left = a.data[j * n + j] - squared(L.row(j).subarray(0, j))
    const pivot = Math.sqrt(Math.max(left, 0))
    L.data[j * n + j] = pivot
    if (pivot === 0) continue
    for (let i = j + 1; i < n; i++) {
      L.data[i * n + j] = (a.data[i * n + j] - dot(L.row(i).subarray(0, j), L.row(j).subarray(0, j))) / pivot
    }
  }
  return L
}

export function squared(v: Float64Array): number {
  return dot(v, v)
}
