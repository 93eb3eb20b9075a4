/** Output space only: log p(y | f), its gradient in f, and a root S of its negative Hessian, S Sᵀ = Λ = −∇²_f log p(y | f). */

export interface Likelihood {
  logProb(f: Float64Array, y: number): number
  /** ∇_f log p(y | f). */
  residual(f: Float64Array, y: number): Float64Array
  /** S (C, K), by rows. */
  hessianRoot(f: Float64Array): Float64Array[]
}

/** y = f + noise, noise ~ N(0, σ²). */
export class Gaussian implements Likelihood {
  constructor(readonly noiseStd: number) {}

  logProb(f: Float64Array, y: number): number {
    const z = (y - f[0]) / this.noiseStd
    return -0.5 * z * z - Math.log(this.noiseStd) - 0.5 * Math.log(2 * Math.PI)
  }

  residual(f: Float64Array, y: number): Float64Array {
    return Float64Array.of((y - f[0]) / this.noiseStd ** 2)
  }

  hessianRoot(): Float64Array[] {
    return [Float64Array.of(1 / this.noiseStd)]
  }
}

/** y is a class, p = softmax(f). */
export class Categorical implements Likelihood {
  logProb(f: Float64Array, y: number): number {
    return f[y] - logSumExp(f)
  }

  residual(f: Float64Array, y: number): Float64Array {
    const r = softmax(f).map((p) => -p)
    r[y] += 1
    return r
  }

  /** Λ = diag p − p pᵀ = S Sᵀ with S = diag √p − p √pᵀ. */
  hessianRoot(f: Float64Array): Float64Array[] {
    const p = softmax(f)
    return Array.from(p, (pi, i) => p.map((pk, k) => (i === k ? Math.sqrt(pi) : 0) - pi * Math.sqrt(pk)))
  }
}

export function logSumExp(f: Float64Array): number {
  let largest = -Infinity
  for (const x of f) largest = Math.max(largest, x)
  let total = 0
  for (const x of f) total += Math.exp(x - largest)
  return largest + Math.log(total)
}

export function softmax(f: Float64Array): Float64Array {
  const total = logSumExp(f)
  return f.map((x) => Math.exp(x - total))
}
