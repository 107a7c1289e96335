//! The smallest ONNX model: one node. Protocol buffers are little enough to be written by hand.

/// An attribute's value.
#[derive(Debug, Clone, Copy)]
pub(super) enum Attribute {
    Int(i64),
    Float(f32),
}

/// Type numbers of ONNX.
#[derive(Debug, Clone, Copy)]
pub(super) enum Type {
    F32 = 1,
    I32 = 6,
}

/// A tensor that goes in or comes out. Inputs that a node leaves out have an empty name.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    pub(super) name: &'static str,
    pub(super) element: Type,
    pub(super) shape: Vec<usize>,
}

/// A model of one operator: its domain and version, its inputs by name, one output.
#[derive(Debug)]
pub(super) struct Node<'a> {
    pub(super) domain: &'a str,
    pub(super) version: u64,
    pub(super) operator: &'a str,
    pub(super) attributes: &'a [(&'a str, Attribute)],
    pub(super) inputs: &'a [Tensor],
    pub(super) output: &'a Tensor,
}

/// Bytes of one message.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut x: u64) {
        while x >= 0x80 {
            self.0.push(x as u8 | 0x80);
            x >>= 7;
        }
        self.0.push(x as u8);
    }

    fn int(mut self, field: u64, x: u64) -> Self {
        self.varint(field << 3);
        self.varint(x);
        self
    }

    fn float(mut self, field: u64, x: f32) -> Self {
        self.varint(field << 3 | 5);
        self.0.extend(x.to_le_bytes());
        self
    }

    fn bytes(mut self, field: u64, x: &[u8]) -> Self {
        self.varint(field << 3 | 2);
        self.varint(x.len() as u64);
        self.0.extend(x);
        self
    }

    fn text(self, field: u64, x: &str) -> Self {
        self.bytes(field, x.as_bytes())
    }

    fn message(self, field: u64, x: Self) -> Self {
        self.bytes(field, &x.0)
    }
}

impl Tensor {
    fn info(&self) -> Message {
        let dims = |shape, &n| Message::message(shape, 1, Message::default().int(1, n as u64));
        let shape = self.shape.iter().fold(Message::default(), dims);
        let tensor = Message::default().int(1, self.element as u64).message(2, shape);
        Message::default().text(1, self.name).message(2, Message::default().message(1, tensor))
    }
}

impl Node<'_> {
    /// The file's bytes.
    pub(super) fn model(&self) -> Vec<u8> {
        let mut node = Message::default();
        for input in self.inputs {
            node = node.text(1, input.name);
        }
        node = node.text(2, self.output.name).text(4, self.operator).text(7, self.domain);
        for &(name, value) in self.attributes {
            let attribute = Message::default().text(1, name);
            node = node.message(
                5,
                match value {
                    Attribute::Float(x) => attribute.float(2, x).int(20, 1),
                    Attribute::Int(x) => attribute.int(3, x as u64).int(20, 2),
                },
            );
        }
        let mut graph = Message::default().message(1, node).text(2, "one node");
        for input in self.inputs.iter().filter(|input| !input.name.is_empty()) {
            graph = graph.message(11, input.info());
        }
        graph = graph.message(12, self.output.info());
        let operators = |domain, version| Message::default().text(1, domain).int(2, version);
        let model = Message::default().int(1, 10).message(7, graph).message(8, operators(self.domain, self.version));
        // Every model names a version of the standard operators, used or not.
        let model = if self.domain.is_empty() { model } else { model.message(8, operators("", 21)) };
        model.0
    }
}
