//! Tests of Sterna's image format and of stores.

mod common;
mod damage;
mod layers;
mod round_trips;
mod stores;
mod working_set;
