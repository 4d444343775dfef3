//! An object storage against a small server of the tests, which checks signatures and fails on request.

mod faults;
mod images;
mod judge;
mod objects;
mod server;
