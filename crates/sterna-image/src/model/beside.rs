//! Sorts stream elements after RAM's START that are not RAM: into setup, between, or devices.

use sterna_wire::main::SectionKind;

use super::shape::Shape;

/// Puts elements after RAM's START that are not RAM into their part of a [`Shape`].
///
/// Every reader of a stream uses this type. The parts are [`Shape::setup`], [`Shape::between`] and the devices. A
/// FULL section is ambiguous: QEMU 10.0 writes some between RAM's sections, and the devices after RAM begin with one.
/// Only the next section of RAM, or the end of the stream, decides which one it is.
#[derive(Debug, Default)]
pub struct Beside {
    /// An element other than a START or FULL section was read.
    is_behind_setup: bool,
    /// Lengths of setup and between at the first FULL section after RAM's last section. Bytes after these lengths are
    /// devices unless another section of RAM follows.
    held: Option<(usize, usize)>,
    /// Elements after RAM's END and before the devices: last sections of other live devices.
    behind: Vec<u8>,
}

impl Beside {
    /// Returns the buffer for an element. `kind` is the kind of a section, and none for a command.
    pub fn place<'a>(&'a mut self, shape: &'a mut Shape, kind: Option<SectionKind>) -> &'a mut Vec<u8> {
        if shape.has_end {
            return &mut self.behind;
        }
        if kind == Some(SectionKind::Full) && self.held.is_none() {
            self.held = Some((shape.setup.len(), shape.between.len()));
        }
        self.is_behind_setup |= !matches!(kind, Some(SectionKind::Start | SectionKind::Full));
        if self.is_behind_setup { &mut shape.between } else { &mut shape.setup }
    }

    /// Records a section of RAM: FULL sections before it are not devices.
    pub fn ram_went_on(&mut self, kind: SectionKind) {
        self.held = None;
        self.is_behind_setup |= kind != SectionKind::Start;
    }

    /// Whether the elements since the first FULL section may be devices.
    pub fn may_be_devices(&self) -> bool {
        self.held.is_some()
    }

    /// Returns the devices that were read so far, when no further section of RAM follows.
    ///
    /// They are all elements since the first FULL section.
    pub fn devices(&mut self, shape: &mut Shape) -> Vec<u8> {
        let mut devices = Vec::new();
        if let Some((setup, between)) = self.held.take() {
            devices = shape.setup.split_off(setup);
            devices.append(&mut shape.between.split_off(between));
        }
        devices.append(&mut self.behind);
        devices
    }
}
