//! Migrations without a protection, because the feature `standby` is off: no value of these types exists.

use std::sync::Arc;

use sterna_ram::{GuestRam, PAGE_SIZE, RamFault, RamSlice};

use crate::error::MigrationError;
use crate::order::PageRun;
use crate::outgoing::guest_source::PageReader;

pub(crate) enum Protecting {}

impl Protecting {
    pub(crate) fn reader(&self) -> Arc<dyn PageReader> {
        match *self {}
    }

    pub(crate) fn fail(&self, _: MigrationError) {
        match *self {}
    }

    pub(crate) fn sent(&self) -> Arc<SentPages> {
        match *self {}
    }

    pub(crate) fn delta_cache(&self, _: &GuestRam, _: u64) -> Option<DeltaCache> {
        match *self {}
    }

    pub(crate) fn take_messages(&self, _: &mut Vec<u8>, _: u64) -> Result<u64, MigrationError> {
        match *self {}
    }
}

/// The sums of checkpoints' pages. Nothing is summed.
#[derive(Default)]
pub(crate) struct PageSums;

impl PageSums {
    pub(crate) fn page(&mut self, _: usize, _: u64, _: &[u8]) {}

    pub(crate) fn zeros(&mut self, _: usize, _: u64, _: u64) {}
}

pub(crate) enum SentPages {}

impl SentPages {
    pub(crate) fn is_counting(&self) -> bool {
        match *self {}
    }

    pub(crate) fn add(&self, _: &PageSums) {
        match *self {}
    }
}

pub(crate) fn add_copied(_: &mut PageSums, _: PageRun, _: &RamSlice<'_>) -> Result<(), RamFault> {
    Ok(())
}

pub(crate) fn add_bytes(_: &mut PageSums, _: PageRun, _: &[u8]) {}

/// How a page of a checkpoint is sent.
#[derive(Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "no page is sent in a checkpoint")]
pub(crate) enum Coded<'a> {
    Same,
    Delta(&'a [u8], &'a [u8; PAGE_SIZE]),
    Whole(&'a [u8; PAGE_SIZE]),
    Uncached,
}

pub(crate) enum DeltaCache {}

/// A lane's buffers for differences.
#[derive(Default)]
pub(crate) struct Scratch;

impl DeltaCache {
    pub(crate) fn send<'a>(
        &self,
        _: u64,
        _: (usize, u64),
        _: &RamSlice<'_>,
        _: &'a mut Scratch,
    ) -> Result<Coded<'a>, RamFault> {
        match *self {}
    }

    pub(crate) fn forget(&self, _: PageRun) {
        match *self {}
    }

    pub(crate) fn zero(&self, _: u64, _: PageRun) {
        match *self {}
    }
}
