import { readFileSync } from 'node:fs'
import { describe, expect, it } from 'vitest'
import { compare, type Cases } from '../src/core/compare'

const TOLERANCE = 1e-6
const cases = JSON.parse(readFileSync(new URL('cases.json', import.meta.url), 'utf-8')) as Cases

/** Answers that other quantities are made from, or that have a test of their own. */
const NOT_COMPARED = new Set(['draws', 'mc_many'])

describe("the numeric core gives Lapwing's numbers", () => {
  const differences = compare(cases)

  it.each(cases.cases.map((each) => each.inputs.name))('%s', (name) => {
    const mine = differences.filter((d) => d.name === name)
    const wrong = mine.filter((d) => !(d.error < TOLERANCE))
    expect(wrong).toEqual([])
  })

  it('compares everything that was recorded', () => {
    for (const each of cases.cases) {
      const compared = new Set(differences.filter((d) => d.name === each.inputs.name).map((d) => d.quantity))
      const missed = Object.keys(each.answers).filter((q) => !compared.has(q) && !NOT_COMPARED.has(q))
      expect(missed).toEqual([])
    }
  })

  it('notices an answer that is off by 1e-5', () => {
    const [first] = cases.cases
    for (const quantity of Object.keys(first.answers).filter((q) => !NOT_COMPARED.has(q))) {
      const off = { ...first, answers: { ...first.answers, [quantity]: scaled(first.answers[quantity]) } }
      const found = compare({ ...cases, cases: [off] }).find((d) => d.quantity === quantity)
      expect(found?.error, quantity).toBeGreaterThan(TOLERANCE)
    }
  })
})

type Nested = number | readonly Nested[]

function scaled(values: Nested): Nested {
  return typeof values === 'number' ? values * (1 + 1e-5) : values.map(scaled)
}
