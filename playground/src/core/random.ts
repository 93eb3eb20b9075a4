/** Repeatable random numbers: the same seed gives the same start weights and the same draws on every machine. */

export class Random {
  private state: number
  private spare: number | null = null

  constructor(seed: number) {
    this.state = seed >>> 0
  }

  /** Uniform on [0, 1): Steele and Vigna's SplitMix idea in 32 bits (“mulberry32”). */
  uniform(): number {
    this.state = (this.state + 0x6d2b79f5) >>> 0
    let t = this.state
    t = Math.imul(t ^ (t >>> 15), t | 1)
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61)
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32
  }

  /** Standard normal, by Box and Muller's transform. */
  normal(): number {
    if (this.spare !== null) {
      const kept = this.spare
      this.spare = null
      return kept
    }
    const radius = Math.sqrt(-2 * Math.log(1 - this.uniform()))
    const angle = 2 * Math.PI * this.uniform()
    this.spare = radius * Math.sin(angle)
    return radius * Math.cos(angle)
  }

  normals(n: number): Float64Array {
    return Float64Array.from({ length: n }, () => this.normal())
  }
}
