//! Begins an image in Sterna's own format, in a file or in a store.

use std::path::Path;
use std::sync::Arc;

use sterna_store::{Block, ImageWriter, Place, StoredImage, WriteOptions};

use super::super::request::ConvertOptions;
use crate::model::Shape;
use crate::read::Access;
use crate::read::open::open_stored;
use crate::{BlockShape, ImageError};

/// The blocks of a machine's RAM as an image in Sterna's format has them.
pub(in crate::convert) fn blocks(shape: &Shape) -> Vec<Block> {
    let block = |block: &BlockShape| Block {
        name: block.name.clone(),
        length_bytes: if block.is_skipped { 0 } else { block.length_bytes },
        address: block.address,
    };
    shape.ram.blocks.iter().map(block).collect()
}

/// Makes a writer for an image in a file or in a store; also returns the base of a layer.
pub(in crate::convert) fn writer_at(
    path: &Path,
    blocks: Vec<Block>,
    options: &ConvertOptions,
    kind: &str,
) -> Result<(ImageWriter, Option<Arc<StoredImage>>), ImageError> {
    let frames = &options.frames;
    let access = Access { key: frames.key.clone(), bases: options.access.bases.clone() };
    let base = frames.base.as_ref().map(|base| open_stored(base, &access)).transpose()?;
    let options = WriteOptions {
        extent_bytes: frames.extent_bytes,
        level: frames.level,
        adapts: frames.adapts,
        key: frames.key.clone(),
        kind: kind.to_owned(),
        base: base.clone(),
        replace: options.replace,
    };
    Ok((Place::parse(path)?.writer(blocks, options)?, base))
}
