//! The target of a destination whose VM does not exist yet. No stream reaches it.

use std::sync::Arc;

use sterna_wire::main::{BodyKind, Configuration, Expectations, SectionKind, SectionKnowledge};

use crate::error::MigrationError;
use crate::hooks::Hook;
use crate::incoming::target::{Layout, RamStart, RamStarted, Section, Target};
use crate::params::Capabilities;
use crate::vm::Device;

pub(super) struct NoVm;

fn missing<T>() -> Result<T, MigrationError> {
    Err(MigrationError::Internal("there is no VM yet".to_owned()))
}

impl Target for NoVm {
    fn uuid(&self) -> Option<[u8; 16]> {
        None
    }

    fn expectations(&self, _: &Capabilities) -> Expectations {
        Expectations::default()
    }

    fn knowledge(&self) -> Box<dyn SectionKnowledge + Send> {
        Box::new(|_: &str, _: u32, _: u32, _: SectionKind| BodyKind::Refuse("there is no VM yet".to_owned()))
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        Vec::new()
    }

    fn known_layout(&self, _: usize) -> Result<Option<Layout>, MigrationError> {
        Ok(None)
    }

    fn configuration(&self, _: &Configuration) -> Result<(), MigrationError> {
        missing()
    }

    fn command(&self, _: &[u8]) -> Result<(), MigrationError> {
        missing()
    }

    fn ram_starts(&self, _: &RamStart<'_>) -> Result<RamStarted, MigrationError> {
        missing()
    }

    fn ram_section_ended(&self, _: SectionKind) {}

    fn section(&self, _: &Section<'_>) -> Result<(), MigrationError> {
        missing()
    }

    fn finish_loading(&self) -> Result<bool, MigrationError> {
        missing()
    }

    fn hooks(&self) -> Vec<Arc<dyn Hook>> {
        Vec::new()
    }

    fn start(&self) -> Result<(), MigrationError> {
        missing()
    }

    fn runs_guests(&self) -> bool {
        false
    }

    fn take_over_paused(&self) -> Result<(), MigrationError> {
        missing()
    }

    fn reset(&self) -> Vec<String> {
        Vec::new()
    }

    fn cleared_pages(&self) -> u64 {
        0
    }
}
