//! Records the inputs of a migration's policy, so that its decisions can be replayed.

use serde::{Deserialize, Serialize};

use super::input::{Begun, Input, Output, Snapshot};
use super::policy::Policy;

/// Maximum number of recorded inputs: some minutes of a migration with rounds of a few milliseconds.
const INPUTS: usize = 16_384;

/// The inputs of a migration's precopy policy, and its decisions. A replay of the inputs gives the same decisions.
///
/// The JSON is read by [`Recording::replay`] of the same version, and by people. Its fields may change.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Recording {
    inputs: Vec<Input>,
    decisions: Vec<Decision>,
    /// The migration had more inputs than the maximum. Only the first ones are recorded.
    #[serde(default)]
    is_cut: bool,
}

/// A decision, and its position among the inputs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Decision {
    /// Number of inputs before the decision.
    after: usize,
    output: Output,
}

impl Recording {
    /// Runs a new policy with the same inputs. Its recording equals this one.
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

    /// Number of recorded inputs.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Number of decisions.
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

/// A policy that records its inputs and decisions.
#[derive(Debug)]
pub struct Recorded {
    policy: Policy,
    recording: Recording,
}

impl Recorded {
    /// Creates a recorded policy, see [`Policy::new`].
    pub fn new(begun: Begun, snapshot: Snapshot) -> Self {
        let mut recording = Recording::default();
        recording.push(Input::Began(begun, snapshot), &[]);
        Self { policy: Policy::new(begun, snapshot), recording }
    }

    /// Processes and records an event, see [`Policy::handle`].
    pub fn handle(&mut self, input: Input) -> Vec<Output> {
        let outputs = self.policy.handle(input);
        self.recording.push(input, &outputs);
        outputs
    }

    /// The recorded policy. It can only be queried: an input must go through [`handle`](Self::handle).
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The recording so far.
    pub fn recording(&self) -> &Recording {
        &self.recording
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports with older names of these fields can be replayed, too.
    #[test]
    fn keys_of_a_recording_are_those_of_reports_that_were_written_before() {
        let observed = serde_json::to_value(Input::Observed(Snapshot::default())).unwrap();

        let round = &observed["Looked"]["pass"];
        assert!(round["left"].is_u64() && round["is_rearmed"].is_boolean(), "{observed}");
    }
}
