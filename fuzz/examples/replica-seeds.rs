//! Writes seeds for the fuzz target `replica_epoch`: the checkpoints of a primary that follows the
//! protocol.
//!
//! `cargo run -p sterna-fuzz --example replica-seeds -- fuzz/seeds` (the directory is the argument).
#![forbid(unsafe_code)]

use std::path::PathBuf;

use sterna_fuzz::targets::replica_epoch::seeds;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args().nth(1).map(PathBuf::from).ok_or("give the directory to write to")?;
    let directory = directory.join("replica_epoch");
    std::fs::create_dir_all(&directory)?;
    for (name, input) in seeds()? {
        std::fs::write(directory.join(name), input)?;
    }
    Ok(())
}
