//! Writes the view of an image in Sterna's own format as it is: the mapped-ram file that the image was made from.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_transport::{CreateOptions, IoPart, PageFile};
use sterna_wire::PAGE_SIZE;

use super::super::counts::Counts;
use crate::ImageError;
use crate::crew;
use crate::read::Image;

/// Bytes that a thread claims in one step: a multiple of every extent.
const UNIT: u64 = 2 << 20;

/// Writes the view to a new file at `path`. Pages of zeros become holes. Returns the file's length.
pub(in crate::convert) fn write(
    image: &Image,
    path: &Path,
    options: CreateOptions,
    threads: usize,
    counts: &Counts,
) -> Result<u64, ImageError> {
    let file = PageFile::create(path, options)?;
    let length = image.stream_end();
    file.set_len(length)?;
    let next = AtomicU64::new(0);
    crew::share(threads, || {
        let mut content = vec![0; UNIT as usize];
        loop {
            let start = next.fetch_add(UNIT, Ordering::Relaxed);
            if start >= length {
                return Ok::<(), ImageError>(());
            }
            let content = &mut content[..UNIT.min(length - start) as usize];
            let done = read(image, start, content).and_then(|()| write_data(&file, start, content));
            if done.is_err() {
                // After an error, the other threads claim no further part.
                next.store(length, Ordering::Relaxed);
            }
            done?;
        }
    })?;
    if let Some(mapped) = image.mapped() {
        for block in mapped.blocks() {
            let held = block.bitmap.count();
            counts.data.fetch_add(held, Ordering::Relaxed);
            counts.zero.fetch_add(block.bitmap.pages() - held, Ordering::Relaxed);
        }
    }
    file.complete()?;
    Ok(length)
}

fn read(image: &Image, start: u64, to: &mut [u8]) -> Result<(), ImageError> {
    let mut done = 0;
    while done < to.len() {
        let read = image.source().read_at(start + done as u64, &mut to[done..]);
        match read.map_err(|error| ImageError::io(image.path_name(), "read", error))? {
            0 => {
                let (file, offset) = (image.path_name().to_owned(), start + done as u64);
                return Err(ImageError::Torn { file, offset, what: "the view" });
            }
            count => done += count,
        }
    }
    Ok(())
}

/// Writes the parts that are not zero.
fn write_data(file: &PageFile, start: u64, content: &[u8]) -> Result<(), ImageError> {
    let is_zero = |at: usize| content[at..].iter().take(PAGE_SIZE).all(|byte| *byte == 0);
    let mut at = 0;
    while at < content.len() {
        let from = at;
        while at < content.len() && !is_zero(at) {
            at += PAGE_SIZE;
        }
        let end = at.min(content.len());
        if end > from {
            file.write_at(start + from as u64, &[IoPart::Bytes(&content[from..end])])?;
        }
        at += PAGE_SIZE;
    }
    Ok(())
}
