//! Writes seeds for the fuzz targets of Sterna's image format, and of libvirt's packets.
//!
//! `cargo run -p sterna-fuzz --example store-seeds -- fuzz/seeds` (the directory is the argument).
#![forbid(unsafe_code)]

use std::path::PathBuf;

use sterna_fuzz::targets::{libvirt_rpc, store_header, store_index, store_layers, store_recipe};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let all = std::env::args().nth(1).map(PathBuf::from).ok_or("give the directory to write to")?;
    for (target, seeds) in [
        ("libvirt_rpc", libvirt_rpc::seeds()),
        ("store_header", store_header::seeds()),
        ("store_index", store_index::seeds()),
        ("store_layers", store_layers::seeds()),
        ("store_recipe", store_recipe::seeds()),
    ] {
        let directory = all.join(target);
        std::fs::create_dir_all(&directory)?;
        for (number, input) in seeds.into_iter().enumerate() {
            std::fs::write(directory.join(format!("{number:03}")), input)?;
        }
    }
    Ok(())
}
