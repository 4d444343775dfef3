//! The inputs of a migration's policy, so that its decisions can be replayed.

use serde::{Deserialize, Serialize};

use super::input::{Begun, Input, Output, Snapshot};
use super::policy::Policy;

/// Inputs that are kept: some minutes of a migration with rounds of a few milliseconds.
const INPUTS: usize = 16_384;

/// The inputs of a migration's precopy policy, and its decisions. Replayed, the same inputs give the same decisions.
///
/// Its JSON is for [`Recording::replay`] of the same version, and for people; its fields may change.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Recording {
    inputs: Vec<Input>,
    decisions: Vec<Decision>,
    /// The migration had more inputs than are kept: the first are here.
    #[serde(default)]
    is_cut: bool,
}

/// What was decided, and when.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Decision {
    /// How many inputs were known.
    after: usize,
    output: Output,
}

impl Recording {
    /// Gives the same inputs to a new policy: what comes of it is equal to this.
    pub fn replay(&self) -> Self {
        let mut again = Self { is_cut: self.is_cut, ..Self::default() };
        let mut policy: Option<Policy> = None;
        for input in &self.inputs {
            let policy = match (&mut policy, input) {
                (empty, Input::Began(begun, snapshot)) => empty.insert(Policy::new(*begun, *snapshot)),
                (Some(policy), _) => policy,
                (None, _) => continue,
            };
            let outputs = if matches!(input, Input::Began(..)) { Vec::new() } else { policy.handle(*input) };
            again.push(*input, &outputs);
        }
        again
    }

    /// How many inputs there are.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// How many decisions came of them.
    pub fn decisions(&self) -> usize {
        self.decisions.len()
    }

    fn push(&mut self, input: Input, outputs: &[Output]) {
        if self.inputs.len() >= INPUTS {
            self.is_cut = true;
            return;
        }
        self.inputs.push(input);
        let after = self.inputs.len();
        self.decisions.extend(outputs.iter().map(|output| Decision { after, output: *output }));
    }
}

/// A policy that records.
#[derive(Debug)]
pub(crate) struct Recorded {
    policy: Policy,
    recording: Recording,
}

impl Recorded {
    /// As [`Policy::new`].
    pub(crate) fn new(begun: Begun, snapshot: Snapshot) -> Self {
        let mut recording = Recording::default();
        recording.push(Input::Began(begun, snapshot), &[]);
        Self { policy: Policy::new(begun, snapshot), recording }
    }

    /// As [`Policy::handle`].
    pub(crate) fn handle(&mut self, input: Input) -> Vec<Output> {
        let outputs = self.policy.handle(input);
        self.recording.push(input, &outputs);
        outputs
    }

    /// The policy.
    pub(crate) fn policy(&self) -> &Policy {
        &self.policy
    }

    /// What was recorded so far.
    pub(crate) fn recording(&self) -> &Recording {
        &self.recording
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports that were written under other names of these fields are replayed, too.
    #[test]
    fn keys_of_a_recording_are_those_of_reports_that_were_written_before() {
        let observed = serde_json::to_value(Input::Observed(Snapshot::default())).unwrap();

        let round = &observed["Looked"]["pass"];
        assert!(round["left"].is_u64() && round["is_rearmed"].is_boolean(), "{observed}");
    }
}
