/**
 * A multi-layer perceptron with tanh between its layers, its outputs, gradients and Jacobian.
 *
 * Weights are one flat vector in the order of `torch.nn.Sequential(Linear, Tanh, Linear, …).named_parameters()`:
 * weight (out, in) row by row, then bias, layer after layer. So a vector from PyTorch is used as it is.
 */

import { Matrix } from './matrix'
import type { Random } from './random'

interface Layer {
  readonly inputs: number
  readonly outputs: number
  readonly weight: number // where its weight starts in θ
  readonly bias: number
}

export class Network {
  readonly layers: readonly Layer[]
  readonly nParameters: number

  /** Widths from inputs to outputs: [1, 10, 10, 1] has two hidden layers. */
  constructor(readonly widths: readonly number[]) {
    const layers: Layer[] = []
    let start = 0
    for (let i = 0; i + 1 < widths.length; i++) {
      const [inputs, outputs] = [widths[i], widths[i + 1]]
      layers.push({ inputs, outputs, weight: start, bias: start + inputs * outputs })
      start += (inputs + 1) * outputs
    }
    this.layers = layers
    this.nParameters = start
  }

  get nOutputs(): number {
    return this.widths[this.widths.length - 1]
  }

  /** Where the last layer's weights start in θ. */
  get lastLayer(): number {
    return this.layers[this.layers.length - 1].weight
  }

  /** Normal start weights with standard deviation gain / √inputs; biases spread the units over the input range. */
  start(random: Random, gain = 1): Float64Array {
    const theta = new Float64Array(this.nParameters)
    this.layers.forEach((layer, l) => {
      const std = (l === 0 ? gain : 1) / Math.sqrt(layer.inputs)
      for (let i = layer.weight; i < layer.bias; i++) theta[i] = std * random.normal()
      const last = l === this.layers.length - 1
      for (let i = 0; i < layer.outputs; i++) theta[layer.bias + i] = last ? 0 : std * random.normal()
    })
    return theta
  }

  /** f(x; θ) for every row of x: (N, C). */
  outputs(theta: Float64Array, x: Matrix): Matrix {
    const made = new Matrix(x.rows, this.nOutputs)
    const activations = this.buffers()
    for (let n = 0; n < x.rows; n++) made.row(n).set(this.forward(theta, x.row(n), activations))
    return made
  }

  /** Outputs, and the Jacobian ∂f/∂θ with one row for each datum and output: (N·C, P). */
  jacobian(theta: Float64Array, x: Matrix): { f: Matrix; J: Matrix } {
    const c = this.nOutputs
    const f = new Matrix(x.rows, c)
    const J = new Matrix(x.rows * c, this.nParameters)
    const activations = this.buffers()
    const seed = new Float64Array(c)
    for (let n = 0; n < x.rows; n++) {
      f.row(n).set(this.forward(theta, x.row(n), activations))
      for (let k = 0; k < c; k++) {
        seed.fill(0)
        seed[k] = 1
        this.backward(theta, activations, seed, J.row(n * c + k))
      }
    }
    return { f, J }
  }

  /** Adds Σₙ J(xₙ)ᵀ gₙ to `into`, where gₙ = pull(f(xₙ), n) is a vector over the outputs. */
  addPullback(
    theta: Float64Array,
    x: Matrix,
    pull: (f: Float64Array, n: number) => Float64Array,
    into: Float64Array,
  ): void {
    const activations = this.buffers()
    for (let n = 0; n < x.rows; n++) {
      const f = this.forward(theta, x.row(n), activations)
      this.backward(theta, activations, pull(f, n), into)
    }
  }

  /** One vector for the input of every layer, and one for the outputs. */
  private buffers(): Float64Array[] {
    return this.widths.map((width) => new Float64Array(width))
  }

  private forward(theta: Float64Array, x: Float64Array, activations: Float64Array[]): Float64Array {
    activations[0].set(x)
    const last = this.layers.length - 1
    this.layers.forEach((layer, l) => {
      const [a, h] = [activations[l], activations[l + 1]]
      for (let i = 0; i < layer.outputs; i++) {
        let total = theta[layer.bias + i]
        const row = layer.weight + i * layer.inputs
        for (let j = 0; j < layer.inputs; j++) total += theta[row + j] * a[j]
        h[i] = l === last ? total : Math.tanh(total)
      }
    })
    return activations[last + 1]
  }

  /** Adds gᵀ ∂f/∂θ to `into`, by reverse mode through the activations of the last forward pass. */
  private backward(theta: Float64Array, activations: Float64Array[], g: Float64Array, into: Float64Array): void {
    let error = Float64Array.from(g)
    for (let l = this.layers.length - 1; l >= 0; l--) {
      const layer = this.layers[l]
      const a = activations[l]
      const below = new Float64Array(layer.inputs)
      for (let i = 0; i < layer.outputs; i++) {
        const row = layer.weight + i * layer.inputs
        into[layer.bias + i] += error[i]
        for (let j = 0; j < layer.inputs; j++) {
          into[row + j] += error[i] * a[j]
          below[j] += error[i] * theta[row + j]
        }
      }
      for (let j = 0; j < layer.inputs; j++) below[j] *= 1 - a[j] * a[j] // tanh′ = 1 − tanh²
      error = below
    }
  }
}
