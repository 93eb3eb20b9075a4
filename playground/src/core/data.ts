import type { Matrix } from './matrix'

/** Inputs, one row each, and targets: a number for regression, the index of a class for classification. */
export interface Data {
  readonly x: Matrix
  readonly y: readonly number[]
}
