/** From a Gaussian over logits to probabilities: E[softmax f], f ~ N(m, V), by rules of increasing care. */

import { logSumExp, softmax } from './likelihoods'
import { cholesky, Matrix } from './matrix'

export type Link = 'mc' | 'pairwise' | 'probit' | 'bridge' | 'bridge_norm' | 'none'

/** `eps`: standard normal points (S, C), used by 'mc' alone. */
export function probabilities(link: Link, m: Float64Array, cov: Matrix, eps: Matrix): Float64Array {
  switch (link) {
    case 'none':
      return softmax(m)
    case 'probit':
      return probit(m, cov)
    case 'pairwise':
      return pairwise(m, cov)
    case 'bridge':
      return softmax(logAlpha(sumZero(m, cov)))
    case 'bridge_norm':
      return softmax(logAlpha(normalised(sumZero(m, cov))))
    case 'mc':
      return monteCarlo(m, cov, eps)
  }
}

/** softmax(m_k / √(1 + π/8 V_kk)). */
function probit(m: Float64Array, cov: Matrix): Float64Array {
  return softmax(m.map((mk, k) => mk / shrink(cov.data[k * cov.cols + k])))
}

/** q_k ∝ 1 / Σ_j exp(−(m_k − m_j) / √(1 + π/8 Var(f_k − f_j))) (Lu et al., 2020). */
function pairwise(m: Float64Array, cov: Matrix): Float64Array {
  const c = m.length
  const entry = (i: number, j: number): number => cov.data[i * c + j]
  const logScores = m.map((_, k) => {
    const gaps = m.map((mj, j) => -(m[k] - mj) / shrink(entry(k, k) + entry(j, j) - 2 * entry(k, j)))
    return -logSumExp(gaps)
  })
  return softmax(logScores)
}

function shrink(variance: number): number {
  return Math.sqrt(1 + (Math.PI / 8) * variance)
}

interface Marginals {
  readonly m: Float64Array
  readonly variances: Float64Array
}

/** Mean and variances given Σ f = 0: m′ = m − s 1ᵀm / 1ᵀs, V′_kk = V_kk − s_k² / 1ᵀs, with s = V 1. */
function sumZero(m: Float64Array, cov: Matrix): Marginals {
  const c = m.length
  const s = m.map((_, k) => cov.row(k).reduce((a, b) => a + b, 0))
  const total = s.reduce((a, b) => a + b, 0)
  const sum = m.reduce((a, b) => a + b, 0)
  const variances = m.map((_, k) => cov.data[k * c + k])
  const free = total > c * Number.EPSILON * variances.reduce((a, b) => a + b, 0)
  const direction = s.map((sk) => (free ? sk / total : 1 / c))
  return {
    m: m.map((mk, k) => mk - direction[k] * sum),
    variances: variances.map((v, k) => v - (free ? s[k] : 0) * direction[k]),
  }
}

/** Rescaled to mean variance √(C/2), where the Laplace bridge is at its best. */
function normalised({ m, variances }: Marginals): Marginals {
  const mean = variances.reduce((a, b) => a + b, 0) / m.length
  const scale = mean / Math.sqrt(m.length / 2)
  return { m: m.map((x) => x / Math.sqrt(scale)), variances: variances.map((v) => v / scale) }
}

/** log α_k, α_k = (1 − 2/C + e^{m_k} / C² Σ_l e^{−m_l}) / V_kk (Hobbhahn et al., 2022). */
function logAlpha({ m, variances }: Marginals): Float64Array {
  const c = m.length
  const others = logSumExp(m.map((x) => -x))
  return m.map((mk, k) => {
    const spread = mk + others - 2 * Math.log(c)
    const constant = c > 2 ? Math.log(1 - 2 / c) : -Infinity
    return logSumExp(Float64Array.of(constant, spread)) - Math.log(variances[k])
  })
}

/** The mean of softmax(m + R ε) over the rows of eps, R Rᵀ = V. Written out: it runs for every pixel of the map. */
function monteCarlo(m: Float64Array, cov: Matrix, eps: Matrix): Float64Array {
  const R = cholesky(cov).data
  const c = m.length
  const total = new Float64Array(c)
  const p = new Float64Array(c)
  for (let s = 0; s < eps.rows; s++) {
    let largest = -Infinity
    for (let i = 0; i < c; i++) {
      let f = m[i]
      for (let j = 0; j <= i; j++) f += R[i * c + j] * eps.data[s * c + j]
      p[i] = f
      largest = Math.max(largest, f)
    }
    let sum = 0
    for (let i = 0; i < c; i++) sum += p[i] = Math.exp(p[i] - largest)
    for (let i = 0; i < c; i++) total[i] += p[i] / sum
  }
  return total.map((t) => t / eps.rows)
}
