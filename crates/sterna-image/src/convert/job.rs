//! One conversion, from the head of its source to the complete target.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_store::{ImageWriter, StoredImage};
use sterna_wire::mapped_ram::PAGES_ALIGNMENT;

use super::check::{Check, check_whole};
use super::counts::{Counted, Counting, Counts};
use super::framed::writer::{blocks, writer_at};
use super::framed::{self, verbatim};
use super::out::{Out, Shared};
use super::request::{ConvertOptions, Output, threads};
use super::{relayout, spread};
use crate::ImageError;
use crate::format::{Form, Format};
use crate::model::Shape;
use crate::read::Image;
use crate::read::begun::Begun;
use crate::read::body::End;
use crate::read::tee::Tee;
use crate::tools::finding::Finding;
use crate::tools::verify::{self, structure};
use crate::write::{Envelope, LegacyWriter, MappedOptions, MappedWriter};

/// One conversion whose source's head is already read.
pub(super) struct Job<'a> {
    pub(super) to: Output,
    pub(super) name: String,
    pub(super) target: Format,
    pub(super) envelope: Option<Envelope>,
    pub(super) options: &'a ConvertOptions,
    pub(super) counts: &'a Counts,
}

impl Job<'_> {
    /// Converts a mapped-ram image. Returns its damage.
    pub(super) fn take_mapped(mut self, image: &Image) -> Result<Vec<Finding>, ImageError> {
        let damage = self.examine(image)?;
        if self.target == Format::Sterna {
            let (writer, _) = self.image_writer(image.shape(), image.stored().map(|stored| stored.kind()))?;
            let threads = threads(self.options.threads);
            let bytes = match image.stored().filter(|_| self.options.xml.is_none()) {
                Some(stored) => framed::of_stored(stored, writer, threads, self.counts)?,
                None => framed::of_mapped(image, writer, threads, self.counts)?,
            };
            self.counts.target_bytes.store(bytes, Ordering::Relaxed);
            return Ok(damage);
        }
        if image.stored().is_some() && self.target == image.view_format() && self.is_layout_kept() {
            let threads = threads(self.options.threads);
            if let Output::File(path) = &self.to {
                let bytes = verbatim::write(image, path, self.options.create(), threads, self.counts)?;
                self.counts.target_bytes.store(bytes, Ordering::Relaxed);
                return Ok(damage);
            }
        }
        if self.target.form() == Form::Mapped {
            let writer = self.mapped_writer(image.shape())?;
            relayout::copy(image, &writer, self.options, self.counts)?;
            image.check_unchanged()?;
            self.complete_mapped(&writer, image.shape())?;
            return Ok(damage);
        }
        let (counts, name) = (self.counts, self.name.clone());
        let shape = image.shape();
        let mut writer = LegacyWriter::new(self.out()?, name.as_str(), shape)?;
        relayout::visit(image, self.options.direct, &mut Counted { to: &mut writer, counts })?;
        image.check_unchanged()?;
        self.complete_out(writer.finish(shape)?, shape)?;
        Ok(damage)
    }

    /// Whether the options ask for nothing that changes the bytes of a mapped-ram image.
    fn is_layout_kept(&self) -> bool {
        let options = self.options;
        options.alignment == PAGES_ALIGNMENT && options.xml.is_none() && options.cookie.is_none()
    }

    /// Returns the damage of `image`. Refuses the image if it has damage, unless that is forced.
    pub(super) fn examine(&self, image: &Image) -> Result<Vec<Finding>, ImageError> {
        check_whole(image.shape(), image.path_name(), image.end())?;
        image.check_bitmaps()?;
        self.damage(image.path_name(), structure(image)?)
    }

    /// Returns the damage among `findings`. Refuses the image if there is any, unless that is forced.
    fn damage(&self, file: &str, findings: Vec<Finding>) -> Result<Vec<Finding>, ImageError> {
        let damage = verify::damage(findings);
        if !self.options.force_damaged {
            verify::refuse(file, &damage)?;
        }
        Ok(damage)
    }

    /// Converts a legacy stream. Returns its shape at its end, and its damage.
    ///
    /// `known` is the shape of the source, if an earlier pass had to read it.
    pub(super) fn take_legacy(
        mut self,
        begun: Begun,
        tee: &Tee,
        known: Option<&Shape>,
        check: &Check<'_>,
    ) -> Result<(Shape, Vec<Finding>), ImageError> {
        let file = begun.file_name().to_owned();
        if self.target == Format::Sterna {
            let head = known.unwrap_or(&begun.head.shape).clone();
            let (writer, base) = self.image_writer(&head, None)?;
            let base = base.filter(|_| self.options.frames.only_changes);
            if self.options.frames.only_changes && base.is_none() {
                let text = "a stream of changes needs the image that they are based on";
                return Err(ImageError::Request(text.to_owned()));
            }
            let checked = |shape: &Shape, end: End| self.damage(&file, check(shape, end)?);
            let threads = threads(self.options.threads);
            let envelope = self.envelope.as_ref();
            let (shape, damage, bytes) = framed::of_legacy(
                begun,
                tee,
                envelope,
                (writer, base.as_deref()),
                threads,
                self.counts,
                &checked,
            )?;
            self.counts.target_bytes.store(bytes, Ordering::Relaxed);
            return Ok((shape, damage));
        }
        if self.target.form() == Form::Legacy {
            let out = Shared::new(self.out()?, &self.name);
            tee.to(Box::new(out.clone())).map_err(|error| crate::write::failed(&self.name, error))?;
            let (shape, end) = begun.finish(&mut Counting(self.counts))?;
            check_whole(&shape, &file, end)?;
            let damage = self.damage(&file, check(&shape, end)?)?;
            tee.release().map_err(|error| crate::write::failed(&self.name, error))?;
            tee.off();
            self.complete_out(out.into_inner()?, &shape)?;
            return Ok((shape, damage));
        }
        tee.off();
        let head = known.unwrap_or(&begun.head.shape).clone();
        let writer = self.mapped_writer(&head)?;
        let (mut shape, end) = spread::spread(begun, &writer, self.options.threads, self.counts)?;
        check_whole(&shape, &file, end)?;
        let damage = self.damage(&file, check(&shape, end)?)?;
        shape.ram.blocks = head.ram.blocks;
        self.complete_mapped(&writer, &shape)?;
        Ok((shape, damage))
    }

    /// The writer of an image in Sterna's own format, and its base.
    fn image_writer(
        &self,
        shape: &Shape,
        kind: Option<&str>,
    ) -> Result<(ImageWriter, Option<Arc<StoredImage>>), ImageError> {
        let Output::File(path) = &self.to else {
            let text =
                "an image in Sterna's format needs a file, not a pipe: use --format legacy or give a file";
            return Err(ImageError::Request(text.to_owned()));
        };
        writer_at(path, blocks(shape), self.options, kind.unwrap_or("qemu"))
    }

    fn mapped_writer(&self, shape: &Shape) -> Result<MappedWriter, ImageError> {
        let Output::File(path) = &self.to else {
            let text = "a mapped-ram image needs a file, not a pipe: use --format legacy or give a file";
            return Err(ImageError::Request(text.to_owned()));
        };
        let options = MappedOptions {
            file: self.options.create(),
            alignment: self.options.alignment,
            start_offset: 0,
            envelope: self.envelope.clone(),
        };
        MappedWriter::create(path, shape, options)
    }

    fn complete_mapped(&self, writer: &MappedWriter, shape: &Shape) -> Result<(), ImageError> {
        writer.complete(shape)?;
        self.counts.target_bytes.store(writer.file().len_bytes()?, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the output for a legacy stream.
    fn out(&mut self) -> Result<Out, ImageError> {
        let (target, threads) = (self.target, threads(self.options.threads));
        match &mut self.to {
            Output::File(path) => {
                Out::file(path, self.options.create(), target, self.envelope.clone(), threads)
            }
            Output::Pipe(pipe) => {
                let pipe = std::mem::replace(pipe, Box::new(std::io::sink()));
                Ok(Out::pipe(pipe, target.compression(), threads))
            }
        }
    }

    fn complete_out(&self, out: Out, shape: &Shape) -> Result<(), ImageError> {
        let bytes = out.complete(shape, &self.name)?;
        self.counts.target_bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }
}
