//! Writes legacy streams: head, one PART with every page, devices (`specs/mapped-ram.md §7.2`).

use std::io::{self, Write};

use sterna_wire::PAGE_SIZE;
use sterna_wire::ram::RamRecordWriter;

use super::encode;
use crate::error::ImageError;
use crate::format::Form;
use crate::model::Shape;
use crate::read::visitor::PageVisitor;

/// Bytes that are collected before a write.
const CHUNK: usize = 1 << 20;

/// Writes a legacy stream.
///
/// The caller must pass every page of every block, with content or as zero. A loader leaves a missing page unchanged
/// (§7.2).
#[derive(Debug)]
pub struct LegacyWriter<W> {
    out: W,
    name: String,
    blocks: Vec<String>,
    records: RamRecordWriter,
    buffer: Vec<u8>,
}

impl<W: Write> LegacyWriter<W> {
    /// Starts a stream of `shape`, whose devices may still be unknown.
    ///
    /// `name` is the name of the file, for errors.
    ///
    /// # Errors
    /// [`ImageError`] if the shape cannot be encoded.
    pub fn new(out: W, name: impl Into<String>, shape: &Shape) -> Result<Self, ImageError> {
        let shape = shape.for_form(Form::Legacy);
        let mut buffer = Vec::with_capacity(CHUNK + 2 * PAGE_SIZE);
        encode::head(&shape, &mut buffer)?;
        for block in &shape.ram.blocks {
            encode::block(block, &mut buffer)?;
        }
        encode::end_of_section(&shape, &mut buffer);
        encode::setup(&shape, &mut buffer);
        encode::part(&shape, &mut buffer);
        let blocks = shape.ram.blocks.into_iter().map(|block| block.name).collect();
        Ok(Self { out, name: name.into(), blocks, records: RamRecordWriter::new(), buffer })
    }

    /// Ends RAM, writes the devices and returns the inner writer, which is not flushed.
    ///
    /// # Errors
    /// [`ImageError`] if a write fails or the shape cannot be encoded.
    pub fn finish(mut self, shape: &Shape) -> Result<W, ImageError> {
        let shape = shape.for_form(Form::Legacy);
        encode::end_of_section(&shape, &mut self.buffer);
        encode::tail(&shape, &mut self.buffer)?;
        self.hand_on(0)?;
        Ok(self.out)
    }

    fn hand_on(&mut self, most: usize) -> Result<(), ImageError> {
        if self.buffer.len() > most {
            let written = self.out.write_all(&self.buffer);
            written.map_err(|error| failed(&self.name, error))?;
            self.buffer.clear();
        }
        Ok(())
    }
}

impl<W: Write> PageVisitor for LegacyWriter<W> {
    fn pages(&mut self, block: usize, first: u64, content: &[u8]) -> Result<(), ImageError> {
        for (page, content) in (first..).zip(content.chunks_exact(PAGE_SIZE)) {
            let name = &self.blocks[block];
            self.records.page_header(block, name, page * PAGE_SIZE as u64, &mut self.buffer)?;
            self.buffer.extend_from_slice(content);
            self.hand_on(CHUNK)?;
        }
        Ok(())
    }

    fn zero(&mut self, block: usize, first: u64, count: u64) -> Result<(), ImageError> {
        for page in first..first + count {
            self.records.zero(block, &self.blocks[block], page * PAGE_SIZE as u64, &mut self.buffer)?;
            self.hand_on(CHUNK)?;
        }
        Ok(())
    }
}

/// Converts an error of an output. An [`ImageError`] inside the `io::Error` is restored.
pub(crate) fn failed(name: &str, error: io::Error) -> ImageError {
    match error.downcast::<ImageError>() {
        Ok(error) => error,
        Err(error) => ImageError::io(name, "write", error),
    }
}
