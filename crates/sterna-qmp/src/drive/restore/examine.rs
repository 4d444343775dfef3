//! The image, looked at before the VM sees it.

use std::path::Path;

use sterna_image::tools::finding::{Finding, Severity};
use sterna_image::tools::verify::structure;
use sterna_image::{Compression, Container, Form, Image, ImageError, ImageKind, Preview, Shape};

use crate::drive::save::check_stream;
use crate::drive::{DriveError, MachineBlock, Vm};

/// An image that may be restored.
#[derive(Debug, Clone)]
pub struct Subject {
    preview: Preview,
    /// What is damaged, as far as it was seen.
    damage: Vec<Finding>,
    /// Whether its last byte was seen; compressed streams end where they end.
    is_whole: bool,
}

impl Subject {
    /// Looks at the image at `path`: all of a mapped-ram image but its pages; head and end of a stream; the head of a
    /// compressed one.
    ///
    /// # Errors
    /// [`DriveError::Unreadable`]: what is wrong with it, and what helps.
    pub fn examine(path: &Path) -> Result<Self, DriveError> {
        let mut preview = Preview::open(path).map_err(unreadable)?;
        let mut is_whole = true;
        let mut damage = Vec::new();
        match (preview.kind.form, preview.kind.compression) {
            (Form::Mapped, _) => {
                let image = Image::open(path).map_err(unreadable)?;
                check_bitmaps(path, &image)?;
                if !has_its_end(&image) {
                    return Err(torn(path));
                }
                damage = structure(&image).map_err(unreadable)?;
                damage.retain(|finding| finding.severity == Severity::Error);
                preview.shape = image.shape().clone();
            }
            (Form::Legacy, Compression::None) => {
                let has_end = check_stream(path, preview.stream_offset).map_err(|error| {
                    DriveError::Unreadable(format!("cannot read {}: {error}", path.display()))
                })?;
                // Something may lie after the end; only a walk over all of it finds that.
                if !has_end && !has_its_end(&Image::open(path).map_err(unreadable)?) {
                    return Err(torn(path));
                }
            }
            (Form::Legacy, _) => is_whole = false,
        }
        Ok(Self { preview, damage, is_whole })
    }

    /// How it is wrapped.
    pub fn kind(&self) -> &ImageKind {
        &self.preview.kind
    }

    /// Its head, and all of a mapped-ram image.
    pub fn shape(&self) -> &Shape {
        &self.preview.shape
    }

    /// Where the stream starts.
    pub fn stream_offset(&self) -> u64 {
        self.preview.stream_offset
    }

    /// Whether its last byte was seen.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Whether the guest ran, if libvirt's header says so; what a bare stream says, the VM reads itself.
    pub fn was_running(&self) -> Option<bool> {
        match &self.preview.kind.container {
            Container::Libvirt(header) => Some(header.was_running != 0),
            Container::Bare => None,
        }
    }

    /// Compares it with the machine of `vm`. Gives back what differs and may do no harm.
    ///
    /// # Errors
    /// [`DriveError::Unfit`]: another machine type, a block that is not there or has another size.
    pub fn compare(&self, vm: &mut Vm) -> Result<Vec<String>, DriveError> {
        self.compare_in(self.preview.kind.form, vm)
    }

    /// As [`compare`](Self::compare), for a VM that gets the image as a stream, whatever its form.
    ///
    /// # Errors
    /// As of [`compare`](Self::compare).
    pub fn compare_as_stream(&self, vm: &mut Vm) -> Result<Vec<String>, DriveError> {
        self.compare_in(Form::Legacy, vm)
    }

    fn compare_in(&self, form: Form, vm: &mut Vm) -> Result<Vec<String>, DriveError> {
        let shape = &self.preview.shape;
        let (saved, machine) = (&shape.configuration.machine_type, vm.machine_type()?);
        if !machine.is_empty() && *saved != machine {
            return Err(DriveError::Unfit(format!(
                "the image is of a `{saved}`, and {} is a `{machine}`: start it with -machine {saved}",
                vm.at()
            )));
        }
        let mut remarks: Vec<String> =
            self.damage.iter().map(|finding| format!("the image is damaged: {finding}")).collect();
        let Some(blocks) = vm.blocks()? else { return Ok(remarks) };
        for block in &shape.ram.blocks {
            compare_block(&block.name, block.length_bytes, form, &blocks, vm.at())?;
        }
        // Machines have blocks that never are in a stream, so this may be nothing.
        let missing = blocks.iter().filter(|m| shape.ram.blocks.iter().all(|block| block.name != m.name));
        remarks.extend(
            missing.map(|block| format!("the machine's RAM block `{}` is not in the image", block.name)),
        );
        Ok(remarks)
    }
}

fn compare_block(
    name: &str,
    bytes: u64,
    form: Form,
    machine: &[MachineBlock],
    at: &str,
) -> Result<(), DriveError> {
    let unfit = |text: String| Err(DriveError::Unfit(text));
    let Some(block) = machine.iter().find(|block| block.name == name) else {
        return unfit(format!(
            "the image has a RAM block `{name}`, and {at} has none: start it with the devices and memory backends \
             that the saved machine had"
        ));
    };
    let can_grow = block.most_bytes > block.used_bytes;
    let fits = match form {
        // A stream's block is resized; a mapped-ram block is not (specs/mapped-ram.md §6.4).
        Form::Legacy if can_grow => bytes <= block.most_bytes,
        Form::Mapped if can_grow => bytes <= block.used_bytes,
        _ => bytes == block.used_bytes,
    };
    if fits {
        return Ok(());
    }
    let advice = if form == Form::Mapped && can_grow {
        "convert the image to the legacy format, in which such a block is resized (`sterna convert`)"
    } else {
        "start it with the same amount of memory as the saved machine"
    };
    unfit(format!(
        "the RAM block `{name}` has {bytes} bytes in the image and {} at {at}: {advice}",
        block.used_bytes
    ))
}

/// A background snapshot's bitmaps were never written (specs/mapped-ram.md §4.9): RAM would be all zero.
fn check_bitmaps(path: &Path, image: &Image) -> Result<(), DriveError> {
    if image.lacks_bitmaps() {
        return Err(DriveError::Unreadable(format!(
            "{} is a background snapshot whose page bitmaps QEMU never wrote; it would load as empty memory: \
             `sterna repair` mends it",
            path.display()
        )));
    }
    Ok(())
}

/// QEMU drops the description without a look, and so loads an image that was cut inside it. But who cut it?
fn has_its_end(image: &Image) -> bool {
    image.shape().has_eof && !image.is_description_torn()
}

fn unreadable(error: ImageError) -> DriveError {
    DriveError::Unreadable(error.to_string())
}

fn torn(path: &Path) -> DriveError {
    DriveError::Unreadable(format!(
        "{} has no end: it is truncated, or still being written; `sterna verify` shows where",
        path.display()
    ))
}
