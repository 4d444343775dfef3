//! Pairs of features, as in docs/combinations.md: which of them exclude each other, with the text of the refusal, and
//! small migrations with two or more features that no other test combines.

mod at_once;
mod refused;
mod together;
