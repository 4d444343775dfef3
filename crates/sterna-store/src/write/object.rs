//! An image that is one object of an object storage: uploaded while it is written, front to back.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::sink::FrameSink;
use crate::error::StoreError;
use crate::objects::{Condition, Objects, Upload};

/// Receives the frames of such an image. No object is visible before the completion.
pub(crate) struct ObjectSink {
    name: String,
    replace: bool,
    state: Mutex<State>,
}

struct State {
    /// None after the completion.
    upload: Option<Box<dyn Upload>>,
    end: u64,
    /// A local copy of what was uploaded, if frames must be read back.
    kept: Option<File>,
}

impl ObjectSink {
    pub(crate) fn create(objects: &Arc<dyn Objects>, key: &str, replace: bool) -> Result<Self, StoreError> {
        let name = format!("{}/{key}", objects.name());
        if !replace {
            match objects.open(key) {
                Err(StoreError::Missing { .. }) => {}
                // Refused now, and not after everything was uploaded. The completion has the condition again.
                Ok(_) => return Err(StoreError::Conflict { name }),
                Err(error) => return Err(error),
            }
        }
        let state = State { upload: Some(objects.upload(key)?), end: 0, kept: None };
        Ok(Self { name, replace, state: Mutex::new(state) })
    }

    fn ended(&self) -> StoreError {
        StoreError::Request(format!("{}: the upload has ended", self.name))
    }
}

impl FrameSink for ObjectSink {
    fn name(&self) -> &str {
        &self.name
    }

    fn begin(&self, header: &[u8]) -> Result<(), StoreError> {
        self.append(header).map(|_| ())
    }

    fn keep_in(&self, file: File) {
        self.state.lock().kept = Some(file);
    }

    fn needs_keeping(&self) -> bool {
        true
    }

    fn append(&self, stored: &[u8]) -> Result<(u32, u64), StoreError> {
        let mut state = self.state.lock();
        let offset = state.end;
        state.upload.as_mut().ok_or_else(|| self.ended())?.write(stored)?;
        if let Some(kept) = &state.kept {
            let name = || format!("the local copy of {}", self.name);
            kept.write_all_at(stored, offset).map_err(|error| StoreError::io(&name(), "write", error))?;
        }
        state.end += stored.len() as u64;
        Ok((0, offset))
    }

    fn read_back(&self, _: u32, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        let state = self.state.lock();
        let Some(kept) = &state.kept else {
            let text =
                format!("{} cannot be read while it is written: write it into a file first", self.name);
            return Err(StoreError::Request(text));
        };
        let name = || format!("the local copy of {}", self.name);
        kept.read_exact_at(to, offset).map_err(|error| StoreError::io(&name(), "read", error))
    }

    fn flush(&self) -> Result<Vec<[u8; 16]>, StoreError> {
        Ok(Vec::new())
    }

    fn end(&self) -> u64 {
        self.state.lock().end
    }

    fn complete(&mut self, _header: &[u8], tail: &[u8]) -> Result<u64, StoreError> {
        let ended = self.ended();
        let state = self.state.get_mut();
        let mut upload = state.upload.take().ok_or(ended)?;
        upload.write(tail)?;
        let condition = if self.replace { Condition::Always } else { Condition::IfAbsent };
        upload.complete(condition)?;
        Ok(state.end + tail.len() as u64)
    }
}
