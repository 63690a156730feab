// Prints what llm-d's adapter for vLLM makes of messages: for each line of standard input, an object of
// JSON with the topic and the payload in base64, a line with the pod, the model and the events.
//
// Built within a clone of github.com/llm-d/llm-d-router, as cmd/adapter/main.go:
// go build -o adapter ./cmd/adapter
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	"github.com/llm-d/llm-d-router/pkg/kvevents"
	"github.com/llm-d/llm-d-router/pkg/kvevents/engineadapter"
)

type message struct {
	Topic   string
	Payload []byte
}

type event struct {
	Type   kvevents.EventType
	Fields kvevents.GenericEvent
}

type answer struct {
	Pod, Model, Error string
	Events            []event
}

func main() {
	adapter := engineadapter.NewVLLMAdapter()
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<26)
	for lines.Scan() {
		var got message
		if err := json.Unmarshal(lines.Bytes(), &got); err != nil {
			panic(err)
		}
		raw := &kvevents.RawMessage{Topic: got.Topic, Payload: got.Payload}
		pod, model, batch, err := adapter.ParseMessage(raw)
		told := answer{Pod: pod, Model: model}
		if err != nil {
			told.Error = err.Error()
		}
		for _, each := range batch.Events {
			told.Events = append(told.Events, event{each.Type(), each})
		}
		line, err := json.Marshal(told)
		if err != nil {
			panic(err)
		}
		fmt.Println(string(line))
	}
}
