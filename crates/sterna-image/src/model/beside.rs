//! What stands after RAM's START and is not RAM: setup, between, or devices.

use sterna_wire::main::SectionKind;

use super::Shape;

/// Puts what comes after RAM's START and is not RAM where it belongs in a [`Shape`], for whoever reads a stream:
/// [`Shape::setup`], [`Shape::between`], or the devices. A FULL section may be one of QEMU 10.0's beside RAM, or the first of
/// the devices behind it: only when RAM goes on, or ends, it is known which.
#[derive(Debug, Default)]
pub struct Beside {
    /// Something else than START and FULL sections has come.
    is_behind_setup: bool,
    /// How much was in setup and between when the first FULL section came since RAM's last section: what follows are
    /// devices unless RAM goes on.
    held: Option<(usize, usize)>,
    /// What came after RAM's END before the devices: last sections of other live devices.
    behind: Vec<u8>,
}

impl Beside {
    /// Where an element belongs; `kind` is that of a section, and none that of a command.
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

    /// A section of RAM has come: what was held before it stands beside RAM.
    pub fn ram_went_on(&mut self, kind: SectionKind) {
        self.held = None;
        self.is_behind_setup |= kind != SectionKind::Start;
    }

    /// Whether what came last may be devices.
    pub fn may_be_devices(&self) -> bool {
        self.held.is_some()
    }

    /// RAM does not go on: the devices that came so far. They are all that came since the first of them.
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
