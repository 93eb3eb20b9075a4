import { describe, expect, it } from 'vitest'
import { eigenSymmetric } from '../src/core/eigen'
import { cholesky, dot, gram, Matrix, timesTransposed } from '../src/core/matrix'
import { Random } from '../src/core/random'

function randomMatrix(rows: number, cols: number, seed: number): Matrix {
  const random = new Random(seed)
  return new Matrix(rows, cols, Float64Array.from({ length: rows * cols }, () => random.normal()))
}

function worst(a: Float64Array, b: Float64Array): number {
  return a.reduce((most, x, i) => Math.max(most, Math.abs(x - b[i])), 0)
}

function identity(n: number): Matrix {
  const made = new Matrix(n, n)
  for (let i = 0; i < n; i++) made.data[i * n + i] = 1
  return made
}

describe('eigenvalues of symmetric matrices', () => {
  const cases: [string, Matrix][] = [
    ['one entry', Matrix.of([[3]])],
    ['two by two', Matrix.of([[2, 1], [1, -1]])],
    ['zero', new Matrix(5, 5)],
    ['identity', identity(6)],
    ['diagonal, unsorted', Matrix.of([[3, 0, 0], [0, -2, 0], [0, 0, 1]])],
    ['full rank', gram(randomMatrix(60, 40, 1))],
    ['rank 3 of 40', gram(randomMatrix(3, 40, 2))],
    ['tiny', new Matrix(4, 4, gram(randomMatrix(9, 4, 3)).data.map((x) => x * 1e-170))],
    ['indefinite, coupled at one place', Matrix.of([[1, 0, 0, 4], [0, 1, 0, 0], [0, 0, 1, 0], [4, 0, 0, 1]])],
  ]

  it.each(cases)('%s: vectors are orthonormal and rebuild the matrix', (_, a) => {
    const { values, vectors } = eigenSymmetric(a)
    const n = a.rows
    expect(worst(timesTransposed(vectors, vectors).data, identity(n).data)).toBeLessThan(1e-13 * (n + 5))
    const rebuilt = new Matrix(n, n)
    for (let k = 0; k < n; k++) {
      const v = vectors.row(k)
      for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) rebuilt.data[i * n + j] += values[k] * v[i] * v[j]
    }
    const scale = Math.max(...values.map(Math.abs), Number.MIN_VALUE)
    expect(worst(rebuilt.data, a.data)).toBeLessThanOrEqual(1e-13 * (n + 5) * scale)
    for (let i = 1; i < n; i++) expect(values[i]).toBeGreaterThanOrEqual(values[i - 1])
  })

  it('finds the known spectrum of the second-difference matrix', () => {
    const n = 30
    const a = new Matrix(n, n)
    for (let i = 0; i < n; i++) {
      a.data[i * n + i] = 2
      if (i > 0) a.data[i * n + i - 1] = a.data[(i - 1) * n + i] = -1
    }
    const known = Float64Array.from({ length: n }, (_, k) => 2 - 2 * Math.cos(((k + 1) * Math.PI) / (n + 1)))
    expect(worst(eigenSymmetric(a).values, known)).toBeLessThan(1e-13)
  })

  it('does not loop on entries that are not finite', () => {
    expect(() => eigenSymmetric(Matrix.of([[1, NaN], [NaN, 1]]))).toThrow(/not finite/)
  })
})

describe('Cholesky factor', () => {
  it('rebuilds a matrix of full rank, and one that is singular', () => {
    for (const a of [gram(randomMatrix(9, 4, 4)), Matrix.of([[1, 1], [1, 1]]), new Matrix(3, 3)]) {
      const L = cholesky(a)
      expect(worst(timesTransposed(L, L).data, a.data)).toBeLessThan(1e-13)
      for (let i = 0; i < a.rows; i++) for (let j = i + 1; j < a.rows; j++) expect(L.data[i * a.rows + j]).toBe(0)
    }
  })
})

describe('random numbers', () => {
  it('are the same for the same seed, and standard normal', () => {
    const [a, b, c] = [new Random(7), new Random(7), new Random(8)]
    const draws = Float64Array.from({ length: 20_000 }, () => a.normal())
    expect(b.normal()).toBe(draws[0])
    expect(c.normal()).not.toBe(draws[0])
    const mean = draws.reduce((s, x) => s + x, 0) / draws.length
    expect(Math.abs(mean)).toBeLessThan(4 / Math.sqrt(draws.length))
    expect(Math.abs(dot(draws, draws) / draws.length - 1)).toBeLessThan(4 * Math.sqrt(2 / draws.length))
  })
})
